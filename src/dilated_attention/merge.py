"""The monoid of partial attention results.

Attention of a query over a set of keys is a pair (out, lse): the softmax-weighted mean of the values, and the natural
logarithm of the sum of exp(scores). For disjoint sets (or multisets) of keys A and B

    lse = log(exp(lse_A) + exp(lse_B)),     out = out_A exp(lse_A - lse) + out_B exp(lse_B - lse);

the identity is (0, -inf). Merging is associative and commutative, so branches, blocks, ring steps and cached keys may
be computed in any order and place. Followed through a network, the backward of each part with the merged (out, lse) in
place of
its own is the exact gradient of the whole: both enter only through P = exp(s - lse) and delta = sum(out * dout).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def merge_into(
    out: Float[Tensor, "*rows dim"],
    lse: Float[Tensor, "*rows"],
    part_out: Float[Tensor, "*rows dim"],
    part_lse: Float[Tensor, "*rows"],
) -> None:
    """Merge a part into the running (out, lse), in place; both may be strided views."""
    # The part's share is exp(part_lse - merged) = sigmoid(part_lse - lse). Two empty rows give NaN: their share is 0.
    share = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0).unsqueeze(-1)
    if out.dtype == share.dtype:
        out.lerp_(part_out, share)
    else:  # half-precision storage, single-precision arithmetic: one rounding a merge
        out.copy_(torch.lerp(out.to(share.dtype), part_out.to(share.dtype), share))
    torch.logaddexp(lse, part_lse, out=part_lse)
    lse.copy_(part_lse)


def merge(
    out: Float[Tensor, "*rows dim"],
    lse: Float[Tensor, "*rows"],
    part_out: Float[Tensor, "*rows dim"],
    part_lse: Float[Tensor, "*rows"],
) -> tuple[Float[Tensor, "*rows dim"], Float[Tensor, "*rows"]]:
    """The merged (out, lse) of two parts, as new tensors."""
    out, lse = out.clone(), lse.clone()
    merge_into(out, lse, part_out, part_lse.clone())
    return out, lse


def add_phantoms(out: Float[Tensor, "*rows dim"], lse: Float[Tensor, "*rows"], number: int) -> None:
    """Merge in place with `number` keys of score 0 and value 0, whose partial result is (0, log number)."""
    merged = torch.logaddexp(lse, lse.new_tensor(math.log(number)))
    out.mul_(torch.exp(lse - merged).unsqueeze(-1))
    lse.copy_(merged)
