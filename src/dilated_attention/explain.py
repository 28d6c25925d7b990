"""Report what a call would do, and why, without doing it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from dilated_attention.backends.blocks import Calls, calls_of
from dilated_attention.call import Call, Options, Pattern, as_autocast, as_one_width, in_tiles
from dilated_attention.errors import UnsupportedError
from dilated_attention.execution import layouts_of
from dilated_attention.layout import BlockLayout
from dilated_attention.neighborhood import Neighborhood
from dilated_attention.parallel import over_mesh
from dilated_attention.parallel.traffic import ExchangePlan, TransportChoice
from dilated_attention.patterns import Dilated, Product, describe_unserved
from dilated_attention.plan import StridedGroup

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Explanation:
    """Describe what a call would do. `explain` returns it, and `print` shows it as a table.

    Attributes:
        backend, reason: the backend that would serve the call, and why.
        refusals: why each other backend would not.
        groups: the strided groups of the plan, in order of execution.
        flops: floating-point operations of the forward, 4 head_dim per score entry. Over several ranks, flops and bytes
            do not take block layouts into account: they count the whole groups.
        bytes: the least memory traffic of the forward on the device: it reads rows of q, k and v, and reads and writes
            rows of out and lse. A row counts once per group that uses it; with a layout, once per call that uses it.
        calls: for each number of tokens that take part in a segment, the calls that the native backend makes for the
            layout of that many tokens.
        transport: with a mesh, how rows travel between ranks, why this way, and why each other way was not chosen.
        exchange: with a mesh, what this rank sends and receives.
        unserved: one line for each branch in which some tokens take part for no head.

    Examples:
        >>> from dilated_attention import Dilated, explain
        >>> q = torch.empty(1, 64, 4, 8)
        >>> explain(q, q, q, Dilated([64], [2]), backend="reference").backend
        'reference'
        >>> explain(q, q, q, Dilated([64], [8])).unserved  # 4 heads cannot serve 8 residues
        ('residues that no head serves: 4 of 8 in branch (64, 8)',)
    """

    backend: str
    reason: str
    refusals: dict[str, str]
    groups: tuple[StridedGroup, ...]
    flops: int
    bytes: int
    calls: dict[int, tuple[Calls, ...]]
    transport: TransportChoice | None = None
    exchange: ExchangePlan | None = None
    unserved: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"backend   {self.backend}: {self.reason}"]
        lines += [f"  not {name}: {why}" for name, why in self.refusals.items()]
        if self.transport is not None:
            lines.append(f"transport {self.transport.transport}: {self.transport.reason}")
            lines += [f"  not {name}: {why}" for name, why in self.transport.refusals.items()]
        if self.exchange is not None:
            moved = self.exchange
            lines.append(
                f"exchange  rank {moved.rank} of {moved.world_size}, forward: {moved.bytes_sent / 1e6:.2f} MB to and "
                f"{moved.bytes_received / 1e6:.2f} MB from other ranks, {moved.peers_sent} and {moved.peers_received} "
                f"messages, {moved.rounds} rounds; backward: {moved.backward_bytes_sent / 1e6:.2f} and "
                f"{moved.backward_bytes_received / 1e6:.2f} MB"
            )
        lines.append(f"forward   {self.flops / 1e9:.3f} GFLOP, at least {self.bytes / 1e6:.2f} MB moved")
        lines += self.unserved
        lines.append("group  heads              segments  rows    stride  first token  written")
        for i, group in enumerate(self.groups):
            rows = group.queries
            heads = f"{group.head}:{group.head + group.heads * group.head_stride}:{group.head_stride}"
            how = "directly" if group.first else "merged"
            lines.append(
                f"{i:<6} {heads:<18} {rows.segments:<9} {rows.count:<7} {rows.stride:<7} {rows.start:<12} {how}"
            )
        for length, calls in self.calls.items():
            lines.append(f"layout of {length} tokens, inside each segment of as many")
            lines.append("rows    queries  keys     diagonal")
            for call in calls:
                diagonal = "cuts" if call.masked else ""
                lines.append(f"{call.rows:<7} {call.queries:<8} {call.keys:<8} {diagonal}".rstrip())
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    compat: str | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Explanation:
    """Report what `attention(q, k, v, pattern, ...)` would do, without computing it. Tensors on the meta device
    suffice.

    It takes the options of `attention`, and `compat` as in `dilated_attention`; `return_lse` does not change the
    report. With a mesh, the groups describe this rank: its own rows and the rows that it receives. With a mesh and
    lengths, samples are handled one after another, and the traffic is summed over the samples.

    Examples:
        >>> from dilated_attention import Dilated, explain
        >>> q = torch.empty(1, 4096, 8, 64, device="meta")
        >>> report = explain(q, q, q, Dilated([1024, 4096], [1, 4]))  # print(report) shows all of it
        >>> dense = 4 * 64 * 8 * 4096**2
        >>> report.flops / dense
        0.3125
    """
    if compat is not None:
        if not isinstance(pattern, Dilated):
            raise ValueError(f"compat={compat!r} is of dilated patterns; leave it out with {type(pattern).__name__}")
        pattern = replace(pattern, compat=compat)
    q, k, v = as_autocast(q, k, v)
    given = {name for name, value in options.items() if value is not None}
    if given & {"q_start", "k_start"} and (isinstance(pattern, (BlockLayout, Product)) or "lengths" in given):
        raise UnsupportedError(
            "explain takes no q_start or k_start with a block layout or lengths; explain the whole sequence"
        )
    if isinstance(pattern, Neighborhood):
        tiled, (q, k, v), options = in_tiles(q, k, v, pattern, options)
        pattern = tiled.layout
    call = Call.of(q, k, v, pattern, **options)
    q, k, v = as_one_width(q, k, v)
    chosen = None
    exchange = None
    if call.shards is None:
        work, layouts = _work(call, q, k)
    else:
        chosen, exchange, shared = over_mesh.account(call, q, k)
        batch = q.shape[0] if call.lengths is None else 1
        work = [(group, batch, None) for group in shared]  # as if there were no layouts
        layouts = list(call.layouts)
        if call.is_causal:
            layouts = [x.causal() for x in layouts]
    inside: dict[int, tuple[Calls, ...]] = {}
    for layout in sorted(layouts, key=lambda x: x.seq_len, reverse=True):
        inside[layout.seq_len] = (*inside.get(layout.seq_len, ()), *calls_of(layout))

    pairs = 0
    moved = 0
    for group, batch, own in work:
        more_pairs, more_moved = _cost(group, batch, own, q, k)
        pairs += more_pairs
        moved += more_moved

    choice = call.choice
    flops = 4 * q.shape[3] * pairs
    groups = tuple(group for group, _, _ in work)
    return Explanation(
        choice.backend.name, choice.reason, choice.refusals, groups, flops, moved, inside, chosen, exchange,
        describe_unserved(call.branches),
    )  # fmt: skip


def _cost(group: StridedGroup, batch: int, own: BlockLayout | None, q: Tensor, k: Tensor) -> tuple[int, int]:
    """Return the number of score entries of a group in `batch` batch elements, and the bytes that it moves at least.
    `own`: its layout, or None."""
    ratio = q.shape[2] // k.shape[2]
    problems = group.queries.segments * batch
    row = q.shape[3] * q.element_size()
    written = 1 if group.first else 2  # a merge reads what it changes
    of_query = row + written * (row + 4)  # a row of q, and those of out and lse
    of_key = 2 * row
    if own is None:
        moved = group.queries.count * ratio * of_query + group.keys.count * of_key
        return batch * ratio * group.entries(), problems * group.heads * moved

    layout = own.for_heads(q.shape[2])
    if layout.num_heads > 1:
        heads: list[int] = []
        for i in range(group.heads):
            first = (group.head + i * group.head_stride) * ratio
            heads += range(first, first + ratio)
        layout = layout.select(heads=heads)
    times = problems * group.heads * ratio // max(1, layout.batch_size * layout.num_heads)  # a batch may be empty
    moved = sum([run.rows * (run.queries * of_query + run.keys * of_key) for run in calls_of(layout)])
    return times * int(layout.seen.sum()), times * moved


def _work(
    call: Call, q: Tensor, k: Tensor
) -> tuple[list[tuple[StridedGroup, int, BlockLayout | None]], list[BlockLayout]]:
    """Return (group, number of batch elements, its layout or None) for all groups, and a list of the layouts used: one
    per length, and per sample if layouts differ by sample. With `lengths` or `cu_seqlens` each sample has its own
    entries."""
    work: list[tuple[StridedGroup, int, BlockLayout | None]] = []
    layouts: dict[tuple[int, int | None], BlockLayout] = {}
    per_sample = any(layout.batch_size > 1 for layout in call.layouts)
    device = None
    if call.layouts:  # q may be on meta
        device = call.layouts[0].device
    for sample, (batch, seq) in enumerate(call.samples(q.shape[1])):
        whole = batch == slice(None)  # not ragged
        plan = call.plan(seq.stop - seq.start, k.shape[1] if whole else None)
        own = layouts_of(call, q, plan, None if whole else sample, device)
        if own is None:
            own = {}
        for group in plan.groups:
            work.append((group, len(range(q.shape[0])[batch]), own.get(group.queries.count)))
        for length, layout in own.items():
            layouts[length, sample if per_sample else None] = layout
    return work, list(layouts.values())
