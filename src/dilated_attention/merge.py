"""Merge partial attention results. They form a monoid.

Attention of a query over a set of keys is a pair (out, lse): the softmax-weighted mean of the values, and the natural
logarithm of the sum of exp(scores). For disjoint sets (or multisets) of keys A and B

    lse = log(exp(lse_A) + exp(lse_B)),     out = out_A exp(lse_A - lse) + out_B exp(lse_B - lse);

the identity is (0, -inf). Merging is associative and commutative, so branches, blocks, ring steps and cached keys
may be computed in any order and place. If the backward of each part is run with the merged (out, lse) in place of the
part's own, the sum of the results is the exact gradient of the whole: out and lse enter only through P = exp(s - lse)
and delta = sum(out * dout).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def running(q: Float[Tensor, "*rows dim"], covered: bool) -> tuple[Float[Tensor, "*rows dim"], Float[Tensor, "*rows"]]:
    """Return new contiguous tensors for out, like q, and its lse: the result (0, -inf) over no keys, or uninitialised
    if `covered`, since the caller then writes every row."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(*q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    if not covered:
        out.zero_()
        lse.fill_(-torch.inf)
    return out, lse


def merge_into(
    out: Float[Tensor, "*rows dim"],
    lse: Float[Tensor, "*rows"],
    part_out: Float[Tensor, "*rows dim"],
    part_lse: Float[Tensor, "*rows"],
) -> None:
    """Merge a partial result into the running (out, lse), in place; tensors may be strided views. part_lse is
    overwritten with the merged lse."""
    # The part's share is exp(part_lse - merged) = sigmoid(part_lse - lse). Two empty rows give NaN: their share is 0.
    share = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0).unsqueeze(-1)
    if out.dtype == share.dtype:
        out.lerp_(part_out, share)
    else:  # half-precision storage, single-precision arithmetic: one rounding per merge
        out.copy_(torch.lerp(out.to(share.dtype), part_out.to(share.dtype), share))
    torch.logaddexp(lse, part_lse, out=part_lse)
    lse.copy_(part_lse)


def merge(
    out: Float[Tensor, "batch seq heads head_dim"],
    lse: Float[Tensor, "batch heads seq"],
    part_out: Float[Tensor, "batch seq heads head_dim"],
    part_lse: Float[Tensor, "batch heads seq"],
) -> tuple[Float[Tensor, "batch seq heads head_dim"], Float[Tensor, "batch heads seq"]]:
    """Merge two partial results (out, lse) over disjoint keys, as the calls return them. Differentiable.

        lse = log(exp(lse_A) + exp(lse_B)),     out = out_A exp(lse_A - lse) + out_B exp(lse_B - lse)

    computed in single precision at least. Where both see nothing, out is 0, lse -inf and every gradient 0.

    Args:
        out, part_out: `(batch, seq, heads, head_dim)`.
        lse, part_lse: `(batch, heads, seq)`, natural logarithm, float32 (float64 for float64): what `return_lse=True`
            gives.

    Returns:
        out and lse, new tensors of the same shapes and dtypes.

    Raises:
        ValueError: a tensor does not fit; the message names it.

    Examples:
        >>> from dilated_attention import Dilated, attention, merge
        >>> q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
        >>> everything, late = Dilated([16], [1]), torch.arange(16)[None] >= 8
        >>> first = attention(q, k, v, everything, key_padding_mask=late, return_lse=True)
        >>> second = attention(q, k, v, everything, key_padding_mask=~late, return_lse=True)
        >>> torch.allclose(merge(*first, *second)[0], attention(q, k, v, everything), atol=1e-5)
        True
    """
    _check_parts(out, lse, part_out, part_lse)
    empty = (lse == -torch.inf) & (part_lse == -torch.inf)
    # Where both are -inf, their difference is NaN, and so would the gradient be: finite numbers go through there.
    a, b = (x.masked_fill(empty, 0.0) for x in (lse, part_lse))
    share = torch.sigmoid(b - a).transpose(1, 2).unsqueeze(-1)
    merged = torch.lerp(out.to(share.dtype), part_out.to(share.dtype), share)
    merged = merged.masked_fill(empty.transpose(1, 2).unsqueeze(-1), 0.0)
    return merged.to(out.dtype), torch.logaddexp(a, b).masked_fill(empty, -torch.inf)


def _check_parts(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    if out.dim() != 4 or not out.is_floating_point():
        raise ValueError(
            f"out must be a floating tensor (batch, seq, heads, head_dim); got {out.dtype} of shape {tuple(out.shape)}"
        )
    batch, seq_len, heads, _ = out.shape
    outs = tuple(out.shape), out.dtype, "(batch, seq, heads, head_dim), as out"
    statistic = torch.promote_types(out.dtype, torch.float32)
    lses = (batch, heads, seq_len), statistic, "(batch, heads, seq), as return_lse=True gives it for this out"
    for name, x, (shape, dtype, order) in (
        ("lse", lse, lses),
        ("part_out", part_out, outs),
        ("part_lse", part_lse, lses),
    ):
        if x.shape != shape or x.dtype != dtype or x.device != out.device:
            raise ValueError(
                f"{name} must be {dtype} of shape {shape} on {out.device}: {order}; "
                f"got {x.dtype} of shape {tuple(x.shape)} on {x.device}"
            )


def add_phantoms(out: Float[Tensor, "*rows dim"], lse: Float[Tensor, "*rows"], number: int) -> None:
    """Merge (out, lse), in place, with `number` >= 1 keys of score 0 and value 0. Their partial result is (0,
    log number)."""
    merged = torch.logaddexp(lse, lse.new_tensor(math.log(number)))
    out.mul_(torch.exp(lse - merged).unsqueeze(-1))
    lse.copy_(merged)


def with_sinks(
    out: Float[Tensor, "batch seq heads dim"], lse: Float[Tensor, "batch seq heads"], sinks: Float[Tensor, " heads"]
) -> Float[Tensor, "batch seq heads dim"]:
    """Return out with one more term, exp(sinks_h), in the softmax denominator of head h: out merged with the partial
    result (0, sinks_h). Differentiable.

    out_i exp(lse_i) / (exp(lse_i) + exp(sinks_h)) = out_i sigmoid(lse_i - sinks_h); 0 where the query sees no key.
    A sink of -inf adds nothing.
    """
    above = (lse - sinks.to(lse.dtype)).masked_fill(lse == -torch.inf, -torch.inf)  # -inf - -inf would be NaN
    return (out * torch.sigmoid(above).unsqueeze(-1)).to(out.dtype)
