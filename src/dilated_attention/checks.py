"""Check the arguments of a call. Each check raises a ValueError that names the argument, the value and the remedy."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from dilated_attention.errors import UnsupportedError
from dilated_attention.torch_internals import in_torch_func, is_mapped, observed

_LARGEST_SCALE = torch.finfo(torch.float32).max
MANY_HEADS = 256
"""The number of KV heads at which seq and heads are probably swapped: models have fewer, and so has decoding, seq 1."""

_PAIRS = (
    "give key_padding_mask=, True for hidden keys, or is_causal=True; a mask over pairs of tokens is a pattern, "
    "BlockLayout.from_mask(mask, block_size=1)"
)
_WINDOW = "give a window as the pattern, Window(before, after)"
_BIAS = "give bias=: a tensor (batch or 1, heads or 1, queries, keys), or a form of dilated_attention.bias"
_SCORES = "scores take no function; give bias=, softcap= or sinks= if that is what it computes, or use FlexAttention"
_NAMED_ELSEWHERE = {
    "attn_mask": _PAIRS, "attention_mask": _PAIRS, "mask": _PAIRS,
    "causal": "give is_causal=", "dropout": "give dropout_p=", "window": _WINDOW, "window_size": _WINDOW,
    "alibi_slopes": "give bias=Alibi(alibi_slopes) of dilated_attention.bias", "score_mod": _SCORES,
    "attn_bias": _BIAS, "position_bias": _BIAS,
    "softmax_scale": "give scale=", "enable_gqa": "leave it out: k and v may always have fewer heads than q",
    "block_mask": "give BlockLayout.from_block_mask(block_mask) as the pattern",
}  # fmt: skip
"""The remedy for each argument that other libraries have under this name."""


def unknown_options(names: Iterable[str]) -> None:
    """Raise TypeError if there is a name."""
    for name in names:
        remedy = _NAMED_ELSEWHERE.get(name, "see help(dilated_attention.attention)")
        raise TypeError(f"unknown argument {name!r}; {remedy}")


def tensors(q: Tensor, k: Tensor, v: Tensor, placed: bool = False) -> None:
    """Raise ValueError unless q, k and v of one call pass the check `dense` and their shapes fit together.

    Only the head_dim of v may differ, q may have a multiple of the heads of k, and, if `placed` (positions were given),
    the lengths of q and k may differ. Warns if seq and heads seem to be swapped.
    """
    dense(q, k, v)
    if torch.jit.is_tracing():  # sizes are tensors there
        raise UnsupportedError(
            "torch.jit.trace cannot record this call; use torch.export instead. For ONNX, call "
            "model.set_attn_implementation('sdpa') on a transformers model that computes its own attention; otherwise "
            "pass backend='reference' and export with dynamo=True"
        )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k and v must have the same shape, but for head_dim; got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    fits = placed or q.shape[1] == k.shape[1]
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]) or not fits:
        same = "batch and head_dim" if placed else "batch, seq and head_dim"
        remedy = ""
        if not fits:
            remedy = (
                ". For fewer queries than keys give q_start, the position of the first; for cross-attention give "
                "q_start=0"
            )
        raise ValueError(
            f"q and k must agree in {same}; got {tuple(q.shape)} and {tuple(k.shape)}, read as (batch, seq, heads, "
            f"head_dim){remedy}"
        )
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise ValueError(f"q and v must have head_dim of at least 1; got {tuple(q.shape)} and {tuple(v.shape)}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"the heads of k and v must divide those of q; got {q.shape[2]} query and {k.shape[2]} key-value heads"
        )
    heads = q.shape[2]
    if heads >= MANY_HEADS and heads > 8 * q.shape[1] and heads == k.shape[2] and not torch.compiler.is_compiling():
        warnings.warn(
            f"q of shape {tuple(q.shape)} is read as (batch, seq, heads, head_dim): {q.shape[1]} tokens of {heads} "
            "heads. If it is (batch, heads, seq, head_dim), as scaled_dot_product_attention has it, give "
            "q.transpose(1, 2), k.transpose(1, 2) and v.transpose(1, 2)",
            stacklevel=outside(),
        )


def dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q, k and v are dense tensors of 4 dimensions, of one floating dtype and on one device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
        if x.is_nested:
            raise ValueError(
                f"{name} must be a dense tensor; got a nested one: give torch.nested.to_padded_tensor({name}, 0.0) "
                "and lengths="
            )
        if x.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions, (batch, seq, heads, head_dim); got shape {tuple(x.shape)}"
            )
        if type(x) is not Tensor and hasattr(x, "to_local"):
            raise ValueError(
                f"{name} must be a plain tensor; got a DTensor. Give {name}.to_local(), this rank's shard, and mesh="
            )
        if x.layout is not torch.strided:
            raise ValueError(f"{name} must be a dense tensor; got layout {x.layout}: give {name}.to_dense()")
        if not x.is_floating_point():
            raise ValueError(f"{name} must have a floating dtype; got {x.dtype}: give {name}.float()")
        if x.dtype != q.dtype:
            raise ValueError(f"q, k and v must share one floating dtype; got {name} {x.dtype} and q {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"q, k and v must be on one device; got {name} on {x.device} and q on {q.device}")


def kind_of(value: Any) -> str:
    """Return the dtype of a tensor, and otherwise the name of the type, for an error."""
    if isinstance(value, Tensor):
        return str(value.dtype)
    return type(value).__name__


def outside() -> int:
    """Return the stack level of the first function outside this package, for warnings."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        level += 1
        frame = frame.f_back
    return level


def ragged(q: Tensor, lengths: Any, cu_seqlens: Any) -> tuple[Tensor | None, Tensor | None]:
    if lengths is not None and cu_seqlens is not None:
        raise ValueError("lengths and cu_seqlens both given; lengths is for padded batches, cu_seqlens for packed ones")
    if lengths is not None:
        lengths = _integer_tensor("lengths", lengths, f"{q.shape[0]} integers, one per batch row", q.shape[0])
    if cu_seqlens is not None:
        cu_seqlens = _integer_tensor("cu_seqlens", cu_seqlens, "(samples + 1,) integers")
        if q.shape[0] != 1:
            raise ValueError(f"cu_seqlens packs samples along seq and needs batch 1; got batch {q.shape[0]}")
    return lengths, cu_seqlens


def ragged_or_masked(
    k: Tensor, lengths: Any, cu_seqlens: Any, key_padding_mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Check lengths and cu_seqlens as `ragged` does, and a key_padding_mask, which excludes both."""
    if key_padding_mask is not None and (lengths is not None or cu_seqlens is not None):
        raise ValueError("key_padding_mask is given beside lengths or cu_seqlens")
    mask(k, key_padding_mask)
    return ragged(k, lengths, cu_seqlens)


def _integer_tensor(name: str, values: Any, wanted: str, number: int | None = None) -> Tensor:
    """Return `number` (None: at least one) integers as flat int64; an error says that `name` must hold `wanted`."""
    if not isinstance(values, Tensor):
        values = torch.tensor(integers(name, values, wanted), dtype=torch.int64, device="cpu")
    fits = values.dim() == 1
    if number is None:
        fits = fits and values.shape[0] > 0
    else:
        fits = fits and values.shape[0] == number
    if not fits or values.is_floating_point() or values.dtype == torch.bool:
        raise ValueError(f"{name} must hold {wanted}; got {values.dtype} of shape {tuple(values.shape)}")
    return values.long()  # wide unsigned integers cannot be compared


def not_mapped(what: str, *tensors: Any) -> None:
    """Raise UnsupportedError if `torch.func.vmap` maps one of the tensors, whose values `what` reads."""
    if any(isinstance(x, Tensor) and is_mapped(x) for x in tensors):
        raise UnsupportedError(
            f"{what} under torch.func.vmap: it reads values, which vmap hides; give the mapped dimension as part of "
            "the batch"
        )


def samples(seq_len: int, lengths: Tensor | None, cu_seqlens: Tensor | None) -> list[tuple[slice, slice]]:
    """Return the (batch, seq) slices of a ragged call's samples, or one of all rows; ValueError if the values do not
    fit."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != seq_len or bounds != sorted(bounds):
            raise ValueError(f"cu_seqlens must ascend from 0 to {seq_len}, the tokens of the sequence; got {bounds}")
        return [(slice(0, 1), slice(start, stop)) for start, stop in pairwise(bounds)]
    if lengths is None:
        return [(slice(None), slice(0, seq_len))]
    values = lengths.tolist()
    if any(not 0 <= length <= seq_len for length in values):
        raise ValueError(f"lengths must lie in [0, {seq_len}], the padded length; got {values}")
    return [(slice(i, i + 1), slice(0, length)) for i, length in enumerate(values)]


def mask(k: Tensor, key_padding_mask: Tensor | None) -> None:
    if key_padding_mask is None:
        return
    if not isinstance(key_padding_mask, Tensor) or key_padding_mask.dtype != torch.bool:
        raise ValueError(
            f"key_padding_mask must be a bool tensor, True where a key is ignored; got {kind_of(key_padding_mask)}"
        )
    if key_padding_mask.shape != k.shape[:2]:
        raise ValueError(
            f"key_padding_mask must have shape (batch, seq) = {tuple(k.shape[:2])}; got {tuple(key_padding_mask.shape)}"
        )
    if key_padding_mask.device != k.device:
        raise ValueError(f"key_padding_mask must be on q's device, {k.device}; got {key_padding_mask.device}")


def sinks(q: Tensor, sinks: Tensor | None) -> None:
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point() or sinks.shape != q.shape[2:3]:
        kind = kind_of(sinks)
        if isinstance(sinks, Tensor):
            kind += f" of shape {tuple(sinks.shape)}"
        raise ValueError(f"sinks must be a floating tensor of {q.shape[2]} logits, one per head of q; got {kind}")
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on q's device, {q.device}; got {sinks.device}")


def boolean(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be a bool; got {value!r}")


def number(name: str, value: float | None) -> None:
    if value is not None and not (isinstance(value, Real) and abs(value) <= _LARGEST_SCALE):
        raise ValueError(f"{name} must be a finite number, in single precision too; got {value!r}")


def positive_number(name: str, value: Any) -> float:
    number(name, value)
    if value is None or not value > 0:
        raise ValueError(f"{name} must be a positive number; got {value!r}")
    return float(value)


def readable(*tensors: Tensor) -> bool:
    """Return whether values can be read at once: plain tensors on the CPU, outside graphs and torch.func."""
    if torch.compiler.is_compiling() or in_torch_func() or observed(*tensors):
        return False
    return all(x.is_cpu for x in tensors)


def indices(what: str, values: Tensor, least: int, stop: int) -> None:
    """Raise ValueError unless values lie in [least, stop); `what` names them. Values that are not `readable` pass."""
    if not readable(values):
        return
    low = least
    high = least
    if values.numel():
        low, high = map(int, values.aminmax())
    if low < least or high >= stop:
        wrong = low if low < least else high
        raise ValueError(f"{what} must lie in [{least}, {stop}); got {wrong}")


def samples_to_continue(samples: Any, batch: int) -> Tensor:
    """Return the sample numbers, which may repeat, as int64 on the CPU; ValueError unless all are in [0, batch)."""
    numbers = integers("samples", samples, "integers, the samples to continue", 0)
    chosen = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    indices("samples", chosen, 0, batch)
    return chosen


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return an integer of Python, NumPy, a tensor or array of no dimension, or a symbol of torch.compile, as an int;
    raise ValueError for anything else, such as a boolean, and outside [least, most]."""
    number = _integer(value)
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        kinds = {None: "an integer", 0: "a non-negative integer", 1: "a positive integer"}
        kind = kinds.get(least, f"an integer of at least {least}")
        if most is not None:
            kind = f"an integer from {least} to {most}"
        raise ValueError(f"{name} must be {kind}; got {value!r}")
    return number


def positive(name: str, value: Any) -> int:
    return integer(name, value, 1)


def kv_heads(num_heads: Any, num_kv_heads: Any) -> tuple[int, int]:
    """Return both as integers; num_kv_heads=None: num_heads."""
    num_heads = positive("num_heads", num_heads)
    if num_kv_heads is None:
        num_kv_heads = num_heads
    num_kv_heads = positive("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads={num_heads}; got {num_kv_heads}")
    return num_heads, num_kv_heads


def heads(embed_dim: Any, num_heads: Any, num_kv_heads: Any) -> tuple[int, int, int]:
    """Return the sizes as integers, as `kv_heads` does."""
    embed_dim = positive("embed_dim", embed_dim)
    sizes = kv_heads(num_heads, num_kv_heads)
    if embed_dim % sizes[0]:
        raise ValueError(f"embed_dim={embed_dim} must be a multiple of num_heads={num_heads}")
    return embed_dim, *sizes


def integers(name: str, values: Any, wanted: str = "integers", least: int | None = None) -> tuple[int, ...]:
    """Return a sequence, array or tensor of integers as ints. For anything else, and for integers below
    `least`, raise a ValueError which says that `name` must hold `wanted`."""
    held = values
    if hasattr(values, "tolist"):
        held = values.tolist()
    if isinstance(held, (str, bytes)) or not isinstance(held, Sequence):
        raise ValueError(f"{name} must hold {wanted}; got {values!r}")
    numbers = [_integer(value) for value in held]
    for value, number in zip(held, numbers, strict=True):
        if number is None or (least is not None and number < least):
            raise ValueError(f"{name} must hold {wanted}; got {value!r} in {list(held)!r}")
    return tuple([number for number in numbers if number is not None])


def _integer(value: Any) -> int | None:
    if type(value) is int:  # by far the most
        return value
    if not isinstance(value, (int, torch.SymInt)) and getattr(value, "ndim", None) == 0:
        value = value.item()  # a number of NumPy, or a tensor or array of no dimension
    if isinstance(value, bool) or not isinstance(value, (Integral, torch.SymInt)):
        return None
    if isinstance(value, (int, torch.SymInt)):
        return value  # type: ignore[return-value]
    return int(value)


def probability(name: str, value: float) -> None:
    if not isinstance(value, Real) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a probability in [0, 1); got {value!r}")
