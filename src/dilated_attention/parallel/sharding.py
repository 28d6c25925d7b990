"""Cut sequences into contiguous shards, one per rank: slices, labels across edges, and the global mean of a loss."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import DeviceMesh, ProcessGroup

from dilated_attention import checks
from dilated_attention.mesh import Mesh, context_group
from dilated_attention.parallel.comm import Link, link_of
from dilated_attention.parallel.partition import balanced_bounds
from dilated_attention.torch_internals import flattened, not_traced


def sequence_range(seq_len: int, mesh: Mesh) -> tuple[int, int]:
    """Return the tokens (start, stop) of a sequence that this rank holds.

    start is floor(rank * seq_len / size), and stop is the start of the next rank.
    """
    seq_len = checks.integer("seq_len", seq_len, 0)
    group = context_group(mesh)
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    return rank * seq_len // size, (rank + 1) * seq_len // size


def shard_sequence(x: Tensor, mesh: Mesh, dim: int = 1) -> Tensor:
    """Return this rank's slice of a sequence that every rank holds whole. It is a view; `dim` is the sequence
    dimension."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim} is none of the {x.dim()} dimensions of x")
    start, stop = sequence_range(x.shape[dim], mesh)
    return x.narrow(dim, start, stop - start)


@not_traced
def from_rank(rank: int, x: Tensor, mesh: Mesh) -> Tensor:
    """Return, on every rank of the mesh, the tensor that the rank numbered `rank` in it passes as x.

    All ranks must pass a tensor of the same shape and dtype.
    """
    group = context_group(mesh)
    x = x.clone(memory_format=torch.contiguous_format)
    with link_of(group).guard(f"while rank {rank} sends to all"):
        dist.broadcast(x, dist.get_global_rank(group, rank), group=group)
    return x


@not_traced
def summed_over(mesh: Mesh, tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over the ranks of the mesh, in place. All ranks must pass tensors of the same
    shapes and dtypes."""
    link = link_of(context_group(mesh))
    with link.guard("while adding up the ranks' rows"):
        for x in tensors:
            dist.all_reduce(x, group=link.group)


def require_same(name: str, mesh: Mesh, tokens: Tensor, **values: Any) -> None:
    """Raise a ValueError on every rank unless all ranks call function `name` with the same tokens and values."""
    digest = hashlib.sha256(tokens.long().cpu().numpy().tobytes()).hexdigest()[:16]
    _compare(name, context_group(mesh), None, tokens, tokens=f"{tuple(tokens.shape)} {digest}", **values)


@not_traced
def _compare(name: str, group: ProcessGroup, problem: str | None, x: Tensor, **values: Any) -> bool:
    """Compare the values of a call of function `name` between the ranks, and whether one refuses it (`Link.compare`).
    Return whether the x of some rank requires gradients."""
    link = link_of(group)
    link.place = name
    wanted = torch.is_grad_enabled()
    facts = {"function": name, "gradients": "on" if wanted else "off", **values}
    text = "\n".join([f"{key}={value}" for key, value in facts.items()])
    return link.compare(text, problem, x.device, wanted and x.requires_grad)


@not_traced
def agreed_seed(mesh: Mesh, device: torch.device) -> Tensor:
    """Return one random int64, of shape (), on every rank of the mesh: the largest of the numbers that each rank
    draws from its own generator."""
    return link_of(context_group(mesh)).agreed_seed(torch.randint(-(1 << 63), (1 << 63) - 1, (), device=device))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, back: bool, bounds: Sequence[int], link: Link, name: str, *past: int) -> Tensor:
        number = link.enter(name, *past)
        ctx.call = (not back, bounds, link, name, number)  # each way is the other's backward
        if back:
            return link.summed(rows, bounds, "in backward")
        return link.whole(rows, bounds, "in forward")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Gathered.apply(gradient, *ctx.call), *(None,) * 5


@not_traced
def gathered(x: Tensor, dim: int, bounds: Sequence[int], mesh: Mesh, name: str) -> Tensor:
    """Gather x from all ranks along dimension `dim`, where rank i holds [bounds[i], bounds[i + 1]).

    The gradient is summed over the ranks' copies. `name` names the call in errors and in messages, on every rank alike.
    """
    whole = _Gathered.apply(x.movedim(dim, 0), False, bounds, link_of(context_group(mesh)), name)
    return whole.movedim(0, dim)


class _Fetched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, tokens: Tensor, bounds: Sequence[int], link: Link, name: str) -> Tensor:
        number = link.enter(name)
        wanted = torch.zeros(1, bounds[-1], dtype=torch.bool, device=rows.device)
        wanted[0, tokens] = True
        by_rank = link.whole(wanted, range(link.size + 1), "while gathering which rows are wanted")
        start, stop = bounds[link.rank], bounds[link.rank + 1]
        peers, index = by_rank[:, start:stop].nonzero(as_tuple=True)
        leaving = peers.bincount(minlength=link.size).tolist()
        arriving = [int(wanted[0, first:last].sum()) for first, last in pairwise(bounds)]
        ctx.save_for_backward(index)
        ctx.call = (leaving, arriving, len(rows), link, name, number)
        return link.moved(rows[index], leaving, arriving, "in forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        leaving, arriving, count, link, name, number = ctx.call
        (index,) = ctx.saved_tensors
        link.enter(name, number)
        returned = link.moved(gradient.contiguous(), arriving, leaving, "in backward")
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = torch.zeros(count, *returned.shape[1:], dtype=wide, device=returned.device)
        total.index_add_(0, index, returned.to(wide))
        return total.to(gradient.dtype), *(None,) * 4


@not_traced
def fetched(x: Tensor, tokens: Tensor, bounds: Sequence[int], mesh: Mesh, name: str) -> Tensor:
    """Return some tokens of a sharded sequence, `(batch, tokens, ...)`, from the ranks that hold them.

    Each rank chooses its own. The gradient of a token is the sum of those of all ranks that fetched it.

    Args:
        x: this rank's shard, `(batch, shard, ...)`. Rank i holds the tokens [bounds[i], bounds[i + 1]).
        tokens: int64, ascending, distinct, and at least one.
        name: names the call in errors and in messages, on every rank alike.
    """
    rows = x.transpose(0, 1).contiguous()
    return _Fetched.apply(rows, tokens, bounds, link_of(context_group(mesh)), name).transpose(0, 1)


def unshard_sequence(x: Tensor, mesh: Mesh, dim: int = 1, seq_len: int | None = None) -> Tensor:
    """Return the whole sequence on every rank, gathered from each rank's shard.

    The gradient of a shard is the sum of the gradients that all ranks compute for it, as in `torch.distributed`'s
    own all_gather.

    Args:
        seq_len: the global length; default: the shard's length times the number of ranks (equal shards).

    Raises:
        ValueError: the shards do not make one sequence. Every rank raises it.
    """
    group = context_group(mesh)
    x, length = agreed_length(x, group, dim, seq_len)
    return gathered(x, dim, balanced_bounds(length, dist.get_world_size(group)), group, "unshard_sequence")


def agreed_length(
    x: Tensor, group: ProcessGroup, dim: int, seq_len: int | None, name: str = "unshard_sequence", refused: str = ""
) -> tuple[Tensor, int]:
    """Return x and the global length along `dim` after checking that every rank holds its shard of it. x then requires
    gradients if some rank's does, so that every rank takes part in the backward.

    Every rank raises a ValueError if the shards do not fit, or if some rank refuses its call or calls another function.
    Without this check a gather could hang or mix up rows.

    Args:
        seq_len: the global length; None: the shard's length times the number of ranks.
        name: the function or layer that asks, the same on every rank.
        refused: why this rank refuses its own call, if it does.
    """
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    shape = [str(n) for n in x.shape]
    length = 0
    problem: str | None = None
    if refused:
        problem = refused
    elif not -x.dim() <= dim < x.dim():
        problem = f"dim={dim} is none of the {x.dim()} dimensions of x"
    else:
        rows = x.shape[dim]
        shape[dim] = "seq"
        if seq_len is None:
            seq_len = rows * size
        try:
            length = checks.integer("seq_len", seq_len, 0)
            start, stop = sequence_range(length, group)
            if rows != stop - start:
                problem = (
                    f"x has {rows} rows in dim {dim}; the shard of rank {rank} of seq_len={length} has {stop - start}"
                )
        except ValueError as error:
            problem = str(error)

    shard = f"{x.dtype} ({', '.join(shape)})"
    required = _compare(name, group, problem, x, shard=shard, seq_len=length)
    if required and not x.requires_grad:
        x = x.detach().requires_grad_()
    return x, length


def shard_labels(labels: Tensor, mesh: Mesh, ignore_index: int = -100) -> Tensor:
    """Return this rank's next-token labels: the label of token p is token p + 1, which the next rank may hold.

    Args:
        labels: `(batch, seq)`, the tokens of the whole sequence, not shifted; the same on every rank.

    Returns:
        `(batch, shard)`; the last token of the sequence gets `ignore_index`.
    """
    if labels.dim() != 2:
        raise ValueError(f"labels must be (batch, seq); got shape {tuple(labels.shape)}")
    start, stop = sequence_range(labels.shape[1], mesh)
    shifted = labels[:, start + 1 : stop + 1]
    return torch.nn.functional.pad(shifted, (0, stop - start - shifted.shape[1]), value=ignore_index)


@not_traced
def cp_mean(loss_sum: Tensor, n_valid: Tensor | int, mesh: Mesh, gradients: Literal["mean", "sum"] = "mean") -> Tensor:
    """Average a loss over all ranks' valid tokens: sum_j loss_sum_j / sum_j n_valid_j, the same on every rank.

    A mean of local means would give a shard with few valid labels the same weight as a full one.

    Args:
        loss_sum: the sum of this rank's token losses, or several that are added up.
        n_valid: the number of tokens in this sum, or several.
        mesh: the ranks to average over. If there are data and context axes, give the mesh of both, `mesh["data",
            "context"]`, which is flattened.
        gradients: how parameter gradients are reduced over `mesh` afterwards: `"mean"` (DDP, FSDP) or `"sum"`. The
            gradient of the result is scaled so that the reduced gradient is exactly the gradient of the global mean.
    """
    if gradients not in ("mean", "sum"):
        raise ValueError(f'gradients must be "mean" or "sum"; got {gradients!r}')
    if isinstance(mesh, DeviceMesh) and mesh.ndim > 1:
        mesh = flattened(mesh)
    link = link_of(context_group(mesh))
    loss_sum = loss_sum.sum()
    n_valid = torch.as_tensor(n_valid, device=loss_sum.device).sum()
    own = torch.stack([loss_sum.detach().double(), n_valid.double()])
    link.enter("cp_mean")
    total = link.whole(own[None], range(link.size + 1), "in the exchange of sums").sum(0)

    size = link.size if gradients == "mean" else 1
    mean = (total[0] / total[1]).to(loss_sum.dtype)
    return mean + (loss_sum - loss_sum.detach()) * (size / total[1]).to(loss_sum.dtype)
