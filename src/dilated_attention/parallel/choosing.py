"""Choose blocks by content over a mesh, and fetch the keys that queries list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention import checks
from dilated_attention.layout import BlockLayout
from dilated_attention.layout.spans import row_offsets
from dilated_attention.mesh import Mesh, context_group
from dilated_attention.parallel import presence
from dilated_attention.parallel.comm import Link, link_of
from dilated_attention.parallel.partition import balanced_bounds
from dilated_attention.parallel.sharding import agreed_length, fetched, gathered
from dilated_attention.torch_internals import not_traced

_FACTS = ("batch", "lists per KV head", "seq_len", "q_block", "k_block", "is_causal")
"""The facts that the layouts of all ranks must share to be joined."""


@not_traced
@torch.no_grad()
def choose_blocks(
    choose: Callable[[Tensor, Tensor], BlockLayout], q: Tensor, k: Tensor, mesh: Mesh, *, seq_len: int | None = None
) -> BlockLayout:
    """Choose blocks of a sequence that is sharded over `mesh`. Every rank gets the layout that one device would choose.

    The key-value heads are divided among the ranks. Each rank receives q and k of all tokens for its heads, at most one
    KV head more than an equal part, and chooses blocks for them. Then the ranks exchange their lists. `attention` with
    this layout over the same mesh moves exactly the rows of k and v that the lists of a rank's queries name, once each,
    and returns their gradients.

    Args:
        choose: a selector with its options, `partial(topk_blocks, density=0.1, is_causal=True)`; or any function of
            q and k that makes each head's lists from that head alone.
        q, k: this rank's shards, `(batch, shard, heads, head_dim)` and `(batch, shard, kv_heads, head_dim)`.
        seq_len: the global length; default: equal shards.

    Raises ValueError on every rank if the shards do not make one sequence, or if on some rank `choose` raises a
    ValueError, returns a layout that does not fit its q and k, or one with other blocks than on the other ranks.
    """
    group = context_group(mesh)
    link = link_of(group)
    name = "choose_blocks"
    _, length = agreed_length(q, group, 1, seq_len, name, _misfit(q, k))
    agreed_length(k, group, 1, length, name)
    link.enter(name)

    bounds = balanced_bounds(length, link.size)
    kv_heads = k.shape[2]
    shares = [-(-rank * kv_heads // link.size) for rank in range(link.size + 1)]
    whole_q, whole_k = _heads_of(link, q, k, bounds, shares)
    layout = None
    error = None
    if whole_k.shape[2]:
        try:
            layout = _chosen(choose, whole_q, whole_k)
        except ValueError as caught:
            error = caught

    own = torch.tensor([_facts_of(layout, whole_k.shape[2])], device=q.device)
    facts = link.whole(own, range(link.size + 1), "in the exchange of sizes").tolist()
    for rank, (first, last) in enumerate(pairwise(shares)):
        if first < last and facts[rank][0] < 0:
            reason = "see its error there" if error is None else error
            raise ValueError(f"choose refused its heads on rank {rank}: {reason}") from error
    shown = []
    for of_rank in facts:
        compared = of_rank if of_rank[0] >= 0 else facts[0]  # a rank without heads has no layout to compare
        shown.append(dict(zip(_FACTS, map(str, compared), strict=False)))
    if any(of_rank != shown[0] for of_rank in shown):
        raise ValueError(
            f"choose gives layouts that do not fit together: {presence.differences(shown)}. Every rank must pass the "
            "same selector with the same options"
        )
    return _joined(link, layout, facts, shares, q.device)


def _chosen(choose: Callable[[Tensor, Tensor], BlockLayout], q: Tensor, k: Tensor) -> BlockLayout:
    """Return the layout that `choose` makes for all tokens of some heads, with separate lists for each head."""
    layout = choose(q, k)
    if not isinstance(layout, BlockLayout):
        raise ValueError(f"a choice must be a BlockLayout; got {type(layout).__name__}")
    if layout.kinds is not None:
        raise ValueError(f"a choice over a mesh must be of whole blocks; got masks inside blocks: {layout}")
    layout.check(len(q), q.shape[1], q.shape[2], k.shape[2])
    if layout.num_heads == 1:
        return layout.select(heads=[0] * k.shape[2])
    return layout


def _facts_of(layout: BlockLayout | None, kv_heads: int) -> list[int]:
    """Return what `_FACTS` names, then the number of blocks; -1 for each without a layout. `kv_heads`: its KV heads."""
    if layout is None:
        return [-1] * (len(_FACTS) + 1)
    ratio = layout.num_heads // kv_heads
    return [layout.batch_size, ratio, layout.seq_len, *layout.block_size, int(layout.is_causal), layout.nnz]


def fetch_listed(
    k: Tensor, v: Tensor, lists: Tensor, bounds: Sequence[int], mesh: Mesh, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys and values that this rank's queries list, `(batch, rows, kv_heads, ...)`, and lists of the rows.

    Each key and value that another rank holds comes once. Gradients go back to the ranks that hold them.

    Args:
        k, v: this rank's shard, `(batch, shard, kv_heads, ...)`. Rank i holds the tokens [bounds[i], bounds[i + 1]).
        lists: for each query of this rank the tokens that it sees, `(batch, queries, k)`, -1 for none.
        name: names the call in errors and in messages, on every rank alike.
    """
    start = bounds[link_of(context_group(mesh)).rank]
    is_listed = torch.zeros(bounds[-1], dtype=torch.bool, device=k.device)
    is_listed[start] = True  # every rank takes part in the backward
    is_listed[lists[lists >= 0].long()] = True
    number = is_listed.cumsum(0) - 1  # of a token among those that are listed

    widths = [k.shape[3], v.shape[3]]
    rows = fetched(torch.cat([k, v], 3), is_listed.nonzero()[:, 0], bounds, mesh, name)
    k, v = rows.split(widths, 3)
    return k, v, number[lists.long()].masked_fill(lists < 0, -1)


def whole_blocks(tokens: int, length: int, stride: int) -> int:
    """Return the number of blocks [i * stride, i * stride + length) that end within the first `tokens` tokens."""
    return max(0, (tokens - length) // stride + 1)


def in_whole_blocks(x: Tensor, length: int, stride: int) -> Tensor:
    """Return the `whole_blocks` of x `(batch, tokens, ...)`: `(batch, blocks, ..., length)`."""
    if x.shape[1] < length:
        return x[:, :0, ..., None].repeat_interleave(length, -1)  # over a mesh all ranks go backward
    return x.unfold(1, length, stride)


def sums_of_blocks(
    of: Callable[[Tensor], Tensor], x: Tensor, length: int, stride: int, edges: Sequence[int], rank: int, mesh: Mesh
) -> Tensor:
    """Return on every rank what `of` makes of each whole block of a sharded sequence, `(batch, blocks, ...)`.

    Block i has the tokens [i * stride, i * stride + length). `of` must be linear in the tokens of a block: each rank
    passes x with 0 at the tokens of other ranks, for the blocks that its tokens lie in, and the results are added.
    The gradient goes back to every rank's x.

    Args:
        of: from `(batch, tokens, ...)`, the tokens of n blocks, to `(batch, n, ...)`; without tokens, n = 0.
        x: the tokens [edges[rank], edges[rank + 1]), `(batch, shard, ...)`; `edges[-1]` is the length of the sequence.
    """
    number = whole_blocks(edges[-1], length, stride)
    touched = []  # for each rank, the blocks in which its tokens lie
    for first, last in pairwise(edges):
        stop = min(number, -(-last // stride)) if last > first else 0
        touched.append(range(whole_blocks(first, length, stride), stop))

    own = touched[rank]
    tokens = 0
    before = 0
    if own:
        tokens = (len(own) - 1) * stride + length
        before = edges[rank] - own.start * stride
    room = (0, 0) * (x.dim() - 2) + (before, max(0, tokens - before - x.shape[1]))
    part = of(F.pad(x, room)[:, :tokens])

    bounds = list(accumulate(map(len, touched), initial=0))
    parts = gathered(part, 1, bounds, mesh, "sums of blocks")
    numbers: list[int] = []
    for some in touched:
        numbers += list(some)
    blocks = torch.tensor(numbers, dtype=torch.int64, device=x.device)
    return parts.new_zeros(len(x), number, *parts.shape[2:]).index_add(1, blocks, parts)


def _misfit(q: Tensor, k: Tensor) -> str:
    """Return why q and k cannot be of one call; "" if they can."""
    try:
        checks.tensors(q, k, k, placed=True)
    except ValueError as error:
        return str(error)
    return ""


def _heads_of(link: Link, q: Tensor, k: Tensor, bounds: tuple[int, ...], shares: list[int]) -> tuple[Tensor, Tensor]:
    """Return (q, k) of all tokens, for the KV heads that this rank gets and the query heads that read them.

    `bounds`: shard edges in tokens. `shares`: rank i gets the KV heads [shares[i], shares[i + 1]). A row of a message
    holds q and k of one token for one rank's heads, padded with zeros to the largest number of heads.
    """
    group = q.shape[2] // k.shape[2]
    both = torch.cat([q.unflatten(2, (-1, group)), k[:, :, :, None]], 3).transpose(0, 1)  # (shard, batch, kv_heads, …)
    counts = [last - first for first, last in pairwise(shares)]
    mine = counts[link.rank]
    leaving = [len(both) if count else 0 for count in counts]
    arriving = [0] * len(counts)
    if mine:
        arriving = [stop - start for start, stop in pairwise(bounds)]

    rows = both.new_zeros(len(counts), len(both), both.shape[1], max(counts), *both.shape[3:])
    for message, (first, last) in zip(rows, pairwise(shares), strict=True):
        message[:, :, : last - first] = both[:, :, first:last]
    rows = rows[torch.tensor(counts) > 0].flatten(0, 1)
    arrived = link.moved(rows, leaving, arriving, "in the exchange of heads").transpose(0, 1)[:, :, :mine]
    return arrived[..., :group, :].flatten(2, 3), arrived[..., group, :]


def _joined(
    link: Link, layout: BlockLayout | None, facts: list[list[int]], shares: list[int], device: torch.device
) -> BlockLayout:
    """Return the layout of all heads: gather the lists rank by rank, then sort them by batch, head and query block.

    `layout`: the layout of this rank's heads; None if it has none. `facts`: for each rank, [batch size, layout heads
    per KV head, seq_len, q_block, k_block, is_causal, number of blocks]. Rank i: KV heads [shares[i], shares[i + 1]).
    """
    batch, ratio, seq_len, q_block, k_block, is_causal, _ = facts[0]
    rows = -(-seq_len // q_block)
    heads = [ratio * edge for edge in shares]
    own = torch.empty(0, batch * rows, dtype=torch.int64, device=device)
    indices = torch.empty(0, dtype=torch.int64, device=device)
    if layout is not None:
        own = layout.counts.expand(batch, -1, -1).transpose(0, 1).flatten(1)
        indices = layout.indices
    counts = link.whole(own, heads, "in the exchange of list lengths").unflatten(1, (batch, rows)).transpose(0, 1)
    ends = list(accumulate((max(0, entries) for *_, entries in facts), initial=0))
    indices = link.whole(indices, ends, "in the exchange of lists")

    # a rank's lists come sample by sample
    number = torch.arange(counts.numel(), device=device).view(counts.shape)
    order = torch.cat([number[:, first:last].flatten() for first, last in pairwise(heads)])
    row = order.repeat_interleave(counts.flatten()[order], output_size=len(indices))
    return BlockLayout(
        row_offsets(counts), indices[row.argsort(stable=True)], seq_len, q_block, k_block, bool(is_causal)
    )
