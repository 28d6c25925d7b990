"""Check the backends on this machine: compare calls of every kind with the definition in double precision.

`dilated-attention info --check` runs them at one head_dim, `dilated-attention bench gpu` at every head_dim and type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dilated_attention import BackendError, BlockLayout, Dilated, Window, attention, dilated_attention
from dilated_attention.bias import Alibi, QueryBias, RelativeBias
from dilated_attention.plumbing import Facts, table

BARS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""The relative error, in norm, that rounding may cause in out, lse, dq, dk, dv and the gradient of a bias."""
ROW = 15
"""The factor by which the relative error of one row may exceed the bar. The largest measured is 5, at 200 and 777
tokens, in dk of scores far below zero."""


@dataclass(frozen=True)
class Check:
    """Describe one call, forward and backward, on random numbers.

    Attributes:
        pattern: a function of the sequence length that returns the pattern; options: arguments of `attention`.
        of_lse: whether the backward also gets a gradient of lse.
        views: whether q, k and v are parts of one tensor whose rows start one element off and have gaps.
        apart: a number added to q and subtracted from k, so that scores lie far below zero.
        head_dims, dtypes: the values to run the call with.
        bias: a function that makes a bias from a random tensor of shape `entries`; None: no bias.
    """

    name: str
    seq_len: int
    pattern: Callable[[int], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    head_dims: tuple[int, ...] = (64,)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    heads: int = 4
    kv_heads: int = 2
    batch: int = 2
    of_lse: bool = True
    views: bool = False
    apart: float = 0.0
    bias: Callable[[Tensor], Any] | None = None
    entries: tuple[int, ...] = ()

    def inputs(self, dtype: torch.dtype, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return random q `(batch, seq, heads, head_dim)`, and k and v with `kv_heads` heads. The seed is fixed."""
        shape = self.batch, self.seq_len, self.heads + 2 * self.kv_heads, head_dim + self.views
        packed = torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device).to(dtype)
        parts = packed[..., int(self.views) :].split((self.heads, self.kv_heads, self.kv_heads), 2)
        q, k, v = (x if self.views else x.contiguous() for x in parts)
        return (q + self.apart, k - self.apart, v) if self.apart else (q, k, v)

    def run(self, q: Tensor, k: Tensor, v: Tensor, backend: str) -> dict[str, Tensor]:
        """Run forward and backward; return out, lse and the gradients of q, k, v and a bias's tensor by name."""
        pattern = self.pattern(self.seq_len)
        options: dict[str, Any] = {
            key: x.to(q.device) if isinstance(x, Tensor) else x for key, x in self.options.items()
        }
        torch.manual_seed(0)  # of dropout
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        leaves = [q, k, v]
        if self.bias is not None:
            generator = torch.Generator(q.device).manual_seed(0)
            entries = torch.rand(self.entries, generator=generator, device=q.device).requires_grad_()
            leaves.append(entries)
            options["bias"] = self.bias(entries)
        if "compat" in options:
            branches = pattern.segment_lengths, pattern.dilation_rates
            out, lse = dilated_attention(
                q, k, v, *branches, offsets=pattern.offsets, return_lse=True, backend=backend, **options
            )
        else:
            out, lse = attention(q, k, v, pattern, return_lse=True, backend=backend, **options)
        wave = [torch.arange(x.numel(), device=x.device).view_as(x).cos().to(x.dtype) for x in (out, lse)]
        number = 2 if self.of_lse else 1
        gradients = torch.autograd.grad((out, lse)[:number], leaves, wave[:number])
        names = ("out", "lse", "dq", "dk", "dv", "dbias")[: 2 + len(leaves)]
        return dict(zip(names, (out, lse, *gradients), strict=True))

    def errors(self, backend: str, dtype: torch.dtype, head_dim: int, device: torch.device) -> dict[str, float]:
        """Return the relative error of each result of `run`, against the definition on the same numbers.

        Raises BackendError if the backend does not serve the call.
        """
        inputs = self.inputs(dtype, head_dim, device)
        with poisoned_memory():
            actual = self.run(*inputs, backend)
        q, k, v = (x.double() for x in inputs)
        expected = self.run(q, k, v, "reference")
        return {name: relative_error(actual[name], expected[name]) for name in expected}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill PyTorch's uninitialised memory with NaN in the `with` block.

    So a row that a kernel leaves unwritten is NaN, and does not keep an earlier call's values.
    """

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*arguments: Any, **options: Any) -> Tensor:
            x = make(*arguments, **options)
            return x.fill_(math.nan) if x.is_floating_point() else x

        return run

    with ExitStack() as patches:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patches.enter_context(patch.object(owner, name, poisoned(getattr(owner, name))))
        yield


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error in norm, over the finite entries.

    It is infinite if the entries that are not finite differ. If the error of one row, divided by `ROW`, is larger,
    return that: errors of a few rows vanish in the norm of all. A row is one token of one head. Its error counts
    relative to its norm, or to the rows' root mean square if that is larger.
    """
    finite, actual = expected.isfinite(), actual.double()
    if not torch.equal(finite, actual.isfinite()):
        return math.inf
    if not torch.equal(actual[~finite].nan_to_num(), expected[~finite].double().nan_to_num()):
        return math.inf
    difference, size = (torch.where(finite, x, 0) for x in (actual - expected, expected))
    whole = difference.norm().item()
    if not whole:
        return 0.0
    tiny = torch.finfo(expected.dtype).tiny
    rows, sizes = (x.norm(dim=-1) if x.dim() == 4 else x.abs() for x in (difference, size))
    row = (rows / sizes.maximum(sizes.square().mean().sqrt()).clamp(min=tiny)).max().item()
    return max(whole / max(size.norm().item(), tiny), row / ROW)


HEAD_DIMS = (16, 24, 32, 48, 64, 80, 96, 128, 192, 256)


def checks(seq_len: int, head_dims: tuple[int, ...] = HEAD_DIMS) -> list[Check]:
    """Return calls with every head_dim, dtype and feature. `seq_len` should be a length that no block size divides."""

    def branches(n: int) -> Dilated:
        return Dilated((n // 3, n), (1, 3))

    padded = torch.arange(seq_len) % 3 == 0
    padded[: seq_len // 3 + 1] = True  # the first segment: rows that see nothing
    return [
        Check("every head_dim", seq_len, branches, head_dims=head_dims),
        Check("every head_dim, causal", seq_len, branches, {"is_causal": True}, head_dims=head_dims),
        Check("nested branches", seq_len, lambda n: Dilated((n // 4, n // 2, n), (1, 2, 4)), kv_heads=4),
        Check("rows in no branch", seq_len, lambda n: Dilated((n // 2, n), (2, 6)), {"is_causal": True}),
        Check("one token", 1, lambda n: Dilated((4,), (1,))),
        Check("head groups", seq_len, lambda n: Dilated((n // 3, n), (1, 3), head_groups=True)),
        Check("views and a scale", seq_len, branches, {"scale": 0.3, "is_causal": True}, views=True),
        Check("scores far below zero", seq_len, branches, {"is_causal": True}, dtypes=(torch.float16, torch.bfloat16),
              apart=5.0),
        Check("phantoms", seq_len, lambda n: Dilated((n // 3, n), (2, 5), "head_block"), {"compat": "torchscale"}),
        Check("lengths", seq_len, branches, {"lengths": [seq_len, seq_len // 2]}),
        Check("packed", seq_len, branches, {"cu_seqlens": torch.tensor([0, seq_len // 2, seq_len // 2 + 1, seq_len])},
              batch=1),
        Check("hidden keys", seq_len, branches, {"key_padding_mask": padded.expand(2, -1)}),
        Check("dropout", seq_len, branches, {"dropout_p": 0.2}),
        Check("a window", seq_len, lambda n: Window(n // 5), {"is_causal": True}),
        Check("a window to both sides", seq_len, lambda n: Window(n // 7, n // 3, leading=5)),
        Check("strided window", seq_len, lambda n: Window(9, 4, rate=3) + Dilated((n // 3,), (2,))),
        Check("capped scores", seq_len, branches, {"is_causal": True, "softcap": 0.7}),
        Check("a slope per head", seq_len, branches, {"is_causal": True}, bias=Alibi, entries=(4,)),
        Check("a table of differences", seq_len, branches, bias=RelativeBias, entries=(4, 41)),
        Check("a bias of each query", seq_len, lambda n: Window(n // 5), {"is_causal": True}, bias=QueryBias,
              entries=(1, seq_len, 4, 20)),
        Check("a bias of each pair", seq_len, branches, bias=lambda pairs: pairs, entries=(1, 4, seq_len, seq_len)),
        Check("blocks", seq_len, lambda n: BlockLayout.random(n, 0.4, 0, 64)),
        Check("blocks of each head", seq_len, lambda n: _layout_of_heads(n, 4)),
        Check("causal blocks", seq_len, lambda n: BlockLayout.random(n, 0.4, 0, (64, 32)), {"is_causal": True}),
        Check("blocks inside dilation", seq_len, lambda n: branches(n) * (lambda m: BlockLayout.local(m, 64, 16)),
              {"is_causal": True}),
    ]  # fmt: skip


def _layout_of_heads(seq_len: int, heads: int) -> BlockLayout:
    """Return a random layout with separate lists per head. The first query block of head 0 sees nothing."""
    blocks = -(-seq_len // 64)
    chosen = torch.rand(1, heads, blocks, blocks, generator=torch.Generator().manual_seed(0)) < 0.4
    chosen[:, 0, 0] = False
    return BlockLayout.from_mask(chosen, seq_len, 64)


LEFT_OUT = (
    "a window to both sides",
    "rows in no branch",
    "head groups",
    "scores far below zero",
    "packed",
    "blocks of each head",
)
"""The `checks` left out of `info --check`: kernels have no separate code for these."""


def kinds(seq_len: int = 200) -> list[Check]:
    """Return one call for each kind that some backend has separate code for."""
    names = {"every head_dim": "two branches", "every head_dim, causal": "two branches, causal"}
    found = [check for check in checks(seq_len, (64,)) if check.name not in LEFT_OUT]
    return [replace(check, name=names.get(check.name, check.name)) for check in found]


@dataclass(frozen=True)
class Verdict:
    """Hold the result of checking one backend with one call.

    Attributes:
        error: the largest error, divided by its bar in `BARS`; None if the call raised an error.
        why: which result has that error; or the error that the call raised; or why the backend refused.
    """

    backend: str
    error: float | None = None
    why: str = ""
    refused: bool = False

    @property
    def right(self) -> bool:
        return self.refused or (self.error is not None and self.error <= 1)

    def __str__(self) -> str:
        if self.error is None:
            return "refused" if self.refused else "FAILED"
        return f"{self.error:.2f}" if self.right else f"WRONG {self.error:.2g}"


def dtype_on(device: torch.device) -> torch.dtype:
    """Return the dtype in which calls are checked on a device: bfloat16 on CUDA, else float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def serving(device: torch.device) -> tuple[list[str], dict[str, str]]:
    """Return the backends, apart from "reference", that serve a device, and why not by name for the others."""
    facts = Facts(device, dtype_on(device))
    absent = {name: why for name, backend in table.BACKENDS.items() if (why := backend.why_not(facts))}
    return [name for name in table.BACKENDS if name not in (*absent, "reference")], absent


def verdicts(check: Check, names: Sequence[str], device: torch.device) -> Iterator[Verdict]:
    """Yield the verdict on each backend for one call."""
    dtype = dtype_on(device)
    for name in names:
        try:
            errors = check.errors(name, dtype, check.head_dims[0], device)
        except BackendError as error:
            yield Verdict(name, why=str(error), refused=True)
        except (RuntimeError, AssertionError, TypeError, OSError) as error:  # of a kernel, or of what compiles it
            yield Verdict(name, why=f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}")
        else:
            worst = max(errors, key=errors.__getitem__)
            yield Verdict(name, errors[worst] / BARS[dtype], why=f"{worst} is off by {errors[worst]:.2g}")
