"""Handle samples of different lengths, padded or packed one after another, and check inputs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dilated_attention.plumbing import checks, in_autocast

MANY = 256  # samples of one token each: more likely tokens of one sample

# Packed tokens that run together without gradients, unless a sample alone has more: enough to fill a device. More would
# take memory, and on CPU time: large new memory costs as much as a sum over it.
PACK = 8192


def packs(counts: Sequence[int]) -> list[tuple[list[int], slice]]:
    """Group neighbouring samples into runs of at most `PACK` tokens; a longer sample is a run by itself.

    counts: the number of tokens of each sample. Returns for each run its samples' counts, and the slice of its tokens.
    """
    packs: list[tuple[list[int], slice]] = []
    start = stop = 0
    pack: list[int] = []
    for count in counts:
        if pack and stop + count - start > PACK:
            packs.append((pack, slice(start, stop)))
            pack = []
            start = stop
        pack.append(count)
        stop += count
    return [*packs, (pack, slice(start, stop))]


def within(counts: Sequence[int], seq: int, device: torch.device) -> Bool[Tensor, "batch seq"]:
    """Return a mask: True at the first `counts[i]` positions of sample i, False at its padding."""
    return torch.arange(seq, device=device) < torch.tensor(counts, device=device)[:, None]


def cumulative(counts: Sequence[int], device: torch.device) -> Int[Tensor, " samples_and_one"]:
    """Return where each packed sample, of `counts[i]` tokens, starts, and where the last one ends."""
    return torch.tensor([0, *counts], device=device).cumsum(0)


def padded(
    x: Float[Tensor, "1 tokens embed_dim"], kept: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq embed_dim"]:
    """Return packed samples as rows padded with zeros; `kept`, from `within`, is True at their tokens."""
    full = x.new_zeros(*kept.shape, x.shape[-1])
    full[kept] = x[0]
    return full


def checked_lengths(lengths: Sequence[int] | Tensor, batch: int, seq: int) -> list[int]:
    """Return lengths as a list; raise ValueError unless they are `batch` integers in [0, seq]."""
    wanted = f"{batch} integers, one per sample"
    values = list(checks.integers("lengths", lengths, wanted))
    if len(values) != batch:
        raise ValueError(f"lengths must hold {wanted}; got {values!r}")
    if any(not 0 <= value <= seq for value in values):
        raise ValueError(f"lengths must lie in [0, {seq}], the padded length; got {values}")
    return values


def packed_counts(cu_seqlens: Sequence[int] | Tensor, batch: int, tokens: int) -> list[int]:
    """Return the number of tokens of each packed sample.

    Raises ValueError unless the edges ascend from 0 to `tokens` in a batch of 1.
    """
    edges = checks.integers("cu_seqlens", cu_seqlens, "(samples + 1,) integers")
    if batch != 1:
        raise ValueError(f"cu_seqlens packs samples along seq and needs batch 1; got batch {batch}")
    counts = [stop - start for start, stop in pairwise(edges)]
    if not edges or edges[0] or edges[-1] != tokens or any(count < 0 for count in counts):
        raise ValueError(f"cu_seqlens must ascend from 0 to {tokens}, the tokens of the sequence; got {list(edges)}")
    return counts


def require_like(weight: Tensor, **inputs: Any) -> None:
    """Raise ValueError unless the inputs are tensors of the weight's dtype.

    Under autocast any floating dtype is allowed.
    """
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor; got {type(x).__name__}: pass torch.as_tensor({name})")
        if x.dtype != weight.dtype and not (x.is_floating_point() and in_autocast(x)):
            raise ValueError(
                f"{name} must have the model's dtype, {weight.dtype}; got {x.dtype}: pass {name}.to({weight.dtype}), "
                "or turn the model with model.to(dtype)"
            )


def require_tokens(inputs: Tensor, vocab_size: int | None) -> None:
    """Raise ValueError unless `inputs` are `(batch, seq)` integers in [0, vocab_size) (checked on the CPU only)."""
    if inputs.dim() != 2 or inputs.is_floating_point() or inputs.dtype == torch.bool:
        raise ValueError(f"inputs must be (batch, seq) token ids; got {inputs.dtype} of shape {tuple(inputs.shape)}")
    checks.indices("inputs, token ids,", inputs.long(), 0, vocab_size or 0)


def warn_of_layout(x: Tensor) -> None:
    """Warn if x `(batch, seq, ...)` has seq 1 and a batch of at least `MANY`: it probably is (seq, batch, ...)."""
    if x.shape[1] == 1 and x.shape[0] >= MANY:
        warnings.warn(
            f"input of shape {tuple(x.shape)} is read as (batch, seq, ...): {x.shape[0]} samples of one token each; "
            "if it is (seq, batch, ...), pass x.transpose(0, 1)",
            stacklevel=4,
        )
