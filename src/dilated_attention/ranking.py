"""Find the largest entries of rows of scores, and cut rows into slices that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dilated_attention.torch_internals import is_mapped

CHUNK = 2**24  # scores held at a time


def stable_topk(x: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return values and indices of the `number` largest entries of each row, descending.

    Equal entries come in their order in the row. With `torch.topk` the choice among equal entries depends on the
    width of the rows and on `number`. A row's width reveals later tokens, on which no token's choice may depend.
    """
    if x.dtype == torch.float64 or is_mapped(x):  # vmap of PyTorch 2.11 knows no view(dtype)
        values, indices = x.sort(dim=-1, descending=True, stable=True)
        return values[..., :number], indices[..., :number]
    # One integer per entry: the high half rises with the float, the low half falls with the place.
    last = x.shape[-1] - 1
    bits = (x.detach().float() + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: they are equal
    order = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits).long().bitwise_left_shift_(32)
    order |= torch.arange(last, -1, -1, device=x.device)
    indices = last - (order.topk(number, dim=-1).values & 0xFFFFFFFF)
    return x.gather(-1, indices), indices


def forced_topk(scores: Tensor, always: Tensor, allowed: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return `stable_topk` of scores: `always` entries first, those not `allowed` last, as -inf."""
    scores = scores.nan_to_num(nan=0.0)  # finite: only the masks below are infinite
    return stable_topk(scores.masked_fill(always, torch.inf).masked_fill(~allowed, -torch.inf), number)


def slices(start: int, stop: int, scores: int) -> Iterator[slice]:
    """Yield slices that cover [start, stop), of at most `CHUNK` scores or one row; a row has `scores` scores."""
    step = max(1, CHUNK // max(1, scores))
    if 0 < stop - start <= step:  # then a graph need not know the number
        yield slice(start, stop)
        return
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))
