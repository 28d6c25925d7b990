"""The calls: check, choose a backend, run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dilated_attention import autograd
from dilated_attention.backends import blocks, reference, table
from dilated_attention.errors import UnsupportedError
from dilated_attention.layout import BlockLayout
from dilated_attention.patterns import Dilated, Offsets, Product, describe_unserved
from dilated_attention.plan import StridedGroup, plan_dilated, row_counts

if TYPE_CHECKING:
    from dilated_attention.parallel.traffic import ExchangePlan, TransportChoice

Pattern = Dilated | BlockLayout | Product

_LARGEST_SCALE = torch.finfo(torch.float32).max


def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    offsets: Offsets = "head",
    head_groups: bool = False,
    compat: str | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    mesh: Any = None,
    seq_len: int | None = None,
    head_offset: int = 0,
    transport: str = "auto",
    layer: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact dilated attention: one softmax over the keys that the branches show, counted with multiplicity.

    Branch (w, r) lets token p take part for head h iff (p mod w) mod r == o(h); a query that takes part sees the keys
    of its segment p // w that take part (causal: keys j <= p). With c(i, j) the number of branches that show key j to
    query i and s = scale q kᵀ,

        out_i = sum_j c exp(s_ij) v_j / sum_j c exp(s_ij),        lse_i = log sum_j c exp(s_ij).

    A query that no branch covers gets out 0, lse -inf and gradient 0. See `Dilated` for the arguments of the pattern;
    the definition is LongNet's (arXiv:2307.02486), without its released code's padding keys and cut gradient.

    Args:
        q: `(batch, seq, heads, head_dim)`; float64, float32, bfloat16 or float16; any strides.
        k, v: `(batch, seq, kv_heads, head_dim)`; kv_heads divides heads. Query head h reads key-value head
            h // (heads // kv_heads) and has its offset.
        segment_lengths, dilation_rates, offsets, head_groups: the pattern, as in `Dilated`.
        compat: `"torchscale"`: the forward of released torchscale, GigaPath and LongViT checkpoints: offsets by head
            block, and, when not causal, the zero keys that pad each segment to a multiple of its rate are attended.
            Its gradient is the true one of that forward.
        is_causal: a query sees no key after itself.
        scale: of the scores, any finite number; default 1 / sqrt(head_dim).
        dropout_p: probability that a weight of the softmax is dropped, the others being divided by 1 - dropout_p; lse
            is that of all. Drawn by torch's generator of q's device, so that `torch.manual_seed` reproduces it: one
            number a call, from which every backend derives the same choice for (sample, query head, query, key). The
            native backend then computes by plain products in single precision, in chunks of bounded memory, since the
            fused operators have no dropout that others could repeat: slower than without dropout.
        lengths: `(batch,)` integers: each sample ends there; rows after it give out 0, lse -inf and influence nothing.
        cu_seqlens: `(samples + 1,)` integers from 0 to seq: samples packed one after another, batch 1, each with a
            segment grid that starts at its own first token.
        key_padding_mask: `(batch, seq)` bool, True: no query sees the key (as in `nn.MultiheadAttention`), which
            may hold anything, NaN included.
        return_lse: also return lse.
        backend: `"auto"`, `"native"` (PyTorch's fused operators), `"triton"` (GPU kernels, unmeasured on a GPU yet),
            `"flash"` (FlashAttention, where it is installed; no masks but the causal one, no dropout, no layouts) or
            `"reference"` (dense, float64 inside, any derivative).
        mesh: a 1-D `torch.distributed.DeviceMesh`, or a ProcessGroup, over whose ranks seq is sharded contiguously:
            q, k, v, out and lse are then this rank's shard, tokens `parallel.sequence_range(seq_len, mesh)`, and the
            result is that of one device. lengths and cu_seqlens stay global.
        seq_len: the global length; default: equal shards, q's length times the number of ranks.
        transport: how rows travel between ranks: `"exchange"`, `"doubling"`, `"ring"`, `"all_gather"`, `"ulysses"`, or
            `"auto"`: see `explain` for what it takes and why.
        head_offset: global index of the first key-value head of these tensors (tensor parallelism).
        layer: what errors of a mesh call this place.

    Returns:
        out, as q; with `return_lse` also lse: `(batch, heads, seq)`, float32 (float64 for float64), natural logarithm,
        differentiable.

    Raises:
        ValueError: naming the argument, its value and what would be right; with a mesh on every rank.
        ContextParallelError: a rank was lost, or sent what it should not have; the group is not used again.
    """
    pattern = Dilated(segment_lengths, dilation_rates, offsets, head_groups)  # type: ignore[arg-type]
    return _attend(
        q, k, v, pattern, compat=compat, is_causal=is_causal, scale=scale, dropout_p=dropout_p, lengths=lengths,
        cu_seqlens=cu_seqlens, key_padding_mask=key_padding_mask, return_lse=return_lse, backend=backend, mesh=mesh,
        seq_len=seq_len, head_offset=head_offset, transport=transport, layer=layer,
    )  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    mesh: Any = None,
    seq_len: int | None = None,
    head_offset: int = 0,
    transport: str = "auto",
    layer: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of any pattern: `Dilated`, `BlockLayout`, or their product `Dilated(...) * layout`.

    Arguments and returns as in `dilated_attention`.
    """
    return _attend(
        q, k, v, pattern, compat=None, is_causal=is_causal, scale=scale, dropout_p=dropout_p, lengths=lengths,
        cu_seqlens=cu_seqlens, key_padding_mask=key_padding_mask, return_lse=return_lse, backend=backend, mesh=mesh,
        seq_len=seq_len, head_offset=head_offset, transport=transport, layer=layer,
    )  # fmt: skip


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    mesh: Any = None,
    seq_len: int | None = None,
    head_offset: int = 0,
    transport: str = "auto",
    layer: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """Block-sparse attention: one softmax a row over all keys of the key blocks that the layout lists for it.

    A query whose block lists nothing gets out 0, lse -inf and gradient 0. Arguments and returns as in
    `dilated_attention`, and:

    Args:
        layout: for q's length, with lists that all heads share, one a query head or one a key-value head, shared by the
            batch or one an element. With `lengths` or `cu_seqlens` each sample has the lists for its first tokens.
        is_causal: blocks above the diagonal are left out, those that it cuts are masked by token.
    """
    if not isinstance(layout, BlockLayout):
        raise ValueError(f"layout must be a BlockLayout; got {type(layout).__name__}")
    return _attend(
        q, k, v, layout, compat=None, is_causal=is_causal, scale=scale, dropout_p=dropout_p, lengths=lengths,
        cu_seqlens=cu_seqlens, key_padding_mask=key_padding_mask, return_lse=return_lse, backend=backend, mesh=mesh,
        seq_len=seq_len, head_offset=head_offset, transport=transport, layer=layer,
    )  # fmt: skip


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    compat: str | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    key_padding_mask: Tensor | None,
    return_lse: bool,
    backend: str,
    mesh: Any,
    seq_len: int | None,
    head_offset: int,
    transport: str,
    layer: str,
) -> Tensor | tuple[Tensor, Tensor]:
    context = None if mesh is None else _context(mesh)
    try:
        q, k, v = _autocast(q, k, v)
        _check_tensors(q, k, v)
        seq_len = _sequence_length(q, seq_len, context, transport)
        lengths, cu_seqlens = _check_ragged(q, lengths, cu_seqlens)
        _check_mask(q, key_padding_mask)
        _check_options(pattern, is_causal, scale, dropout_p)
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        dilated = _dilated(pattern, seq_len)
        if table.plainly_native(backend, q.device, q.dtype):
            backend = "native"
        else:
            backend = _choose(backend, q, pattern, dilated, dropout_p, key_padding_mask).backend
        _check_mesh(context, backend, dropout_p, key_padding_mask)
        offsets = offset_table(dilated, compat, k.shape[2], head_offset)
        layouts = _layouts(pattern, q, k.shape[2], seq_len, offsets, lengths, cu_seqlens)
    except ValueError as error:
        if context is not None and context.size > 1:
            from dilated_attention.parallel.attention import refuse

            refuse(mesh, error, q.device if isinstance(q, Tensor) else torch.device("cpu"))
        raise
    if key_padding_mask is not None:  # a weight of 0 times NaN would be NaN
        k, v = (x.masked_fill(key_padding_mask[:, :, None, None], 0.0) for x in (k, v))
    seed = torch.randint(-(1 << 63), (1 << 63) - 1, (), device=q.device) if dropout_p else None
    first_head = head_offset * (q.shape[2] // k.shape[2])
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "compat": compat}
    ragged: dict[str, Any] = {"lengths": lengths, "cu_seqlens": cu_seqlens, "key_padding_mask": key_padding_mask}
    segments, rates = dilated.segment_lengths, dilated.dilation_rates
    if backend == "reference":
        for _ in autograd.samples(seq_len, lengths, cu_seqlens):
            pass  # checks the lengths
        visible = None
        if layouts:
            ratio = q.shape[2] // k.shape[2]  # layouts count query heads, the oracle's counts key-value heads
            k, v = (x.repeat_interleave(ratio, 2) for x in (k, v))
            offsets = tuple(tuple(o for o in row for _ in range(ratio)) for row in offsets)
            visible = _dense_layouts(layouts, q.shape[2])
        out, lse = reference.reference_attention(
            q, k, v, segments, rates, offsets, **options, **ragged, visible=visible,
            dropout=autograd.dropout(q, k, dropout_p, first_head, seed),
        )  # fmt: skip
    elif context is not None and context.size > 1:
        from dilated_attention.parallel.attention import context_parallel_attention

        out, lse = context_parallel_attention(
            q, k, v, segments, rates, offsets, mesh=mesh, seq_len=seq_len, **options, lengths=lengths,
            cu_seqlens=cu_seqlens, layouts=[x.for_heads(q.shape[2]).to(q.device) for x in layouts],
            backend=backend, transport=transport, layer=layer,
        )  # fmt: skip
    else:
        out, lse = autograd.attend(
            q, k, v, list(segments), list(rates), [offset for row in offsets for offset in row], is_causal, scale,
            compat or "", backend, float(dropout_p), first_head, *autograd.pack_layouts(layouts),
            lengths, cu_seqlens, key_padding_mask, seed,
        )  # fmt: skip
    return (out, lse.transpose(1, 2)) if return_lse else out


def _choose(
    backend: str,
    q: Tensor,
    pattern: Pattern,
    dilated: Dilated,
    dropout_p: float,
    key_padding_mask: Tensor | None,
) -> table.Choice:
    """The backend of a call, which `explain` tells by the same facts."""
    asked = {
        "key_padding_mask": key_padding_mask is not None,
        "dropout_p": dropout_p > 0,
        "a block layout": not isinstance(pattern, Dilated),
    }
    return table.choose(
        backend, q.device, q.dtype, head_dim=q.shape[3], seq_len=q.shape[1],
        needs=[name for name, given in asked.items() if given], work=_work(dilated, q),
    )  # fmt: skip


@dataclass(frozen=True)
class _Context:
    """This rank's place in a mesh."""

    rank: int
    size: int


def _context(mesh: Any) -> _Context:
    import torch.distributed as dist

    from dilated_attention.parallel.sharding import context_group

    group = context_group(mesh)
    return _Context(dist.get_rank(group), dist.get_world_size(group))


def _sequence_length(q: Tensor, seq_len: int | None, context: _Context | None, transport: str) -> int:
    """The global length, of which q is this rank's shard."""
    if context is None:
        if transport != "auto":
            raise ValueError(f"transport={transport!r} needs a mesh; use transport='auto'")
        if seq_len is not None and seq_len != q.shape[1]:
            raise ValueError(f"seq_len={seq_len} without a mesh must be q's own length, {q.shape[1]}; leave it out")
        return q.shape[1]
    if seq_len is None:
        return q.shape[1] * context.size
    if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 0:
        raise ValueError(f"seq_len must be a non-negative integer, the length over all ranks; got {seq_len!r}")
    return seq_len


def _check_mesh(context: _Context | None, backend: str, dropout_p: float, key_padding_mask: Tensor | None) -> None:
    if context is None:
        return
    if backend not in ("native", "triton"):
        raise UnsupportedError(f"backend={backend!r} sees one device; with a mesh use backend='auto'")
    if context.size > 1:
        for name, given in (("key_padding_mask", key_padding_mask is not None), ("dropout_p", dropout_p > 0)):
            if given:
                raise UnsupportedError(f"{name} with a mesh is not supported; leave it out")


def _check_options(pattern: Pattern, is_causal: bool, scale: float | None, dropout_p: float) -> None:
    if not isinstance(pattern, (Dilated, Product, BlockLayout)):
        raise ValueError(f"pattern must be a Dilated, a BlockLayout or their product; got {type(pattern).__name__}")
    if not isinstance(is_causal, bool):
        raise ValueError(f"is_causal must be a bool; got {is_causal!r}")
    if scale is not None and not (isinstance(scale, (int, float)) and abs(scale) <= _LARGEST_SCALE):
        raise ValueError(f"scale must be a finite number, in single precision too; got {scale!r}")
    if not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be a probability in [0, 1); got {dropout_p!r}")


def offset_table(pattern: Dilated, compat: str | None, num_heads: int, head_offset: int) -> tuple[tuple[int, ...], ...]:
    """`Dilated.offset_table`; by head block where `compat` asks for it."""
    if compat not in (None, "torchscale"):
        raise ValueError(f'compat must be None or "torchscale"; got {compat!r}')
    if compat == "torchscale":
        if pattern.head_groups:
            raise ValueError('compat="torchscale" has offsets by head block and no head groups; got head_groups=True')
        if pattern.offsets == "head":
            pattern = Dilated(pattern.segment_lengths, pattern.dilation_rates, "head_block")
    return pattern.offset_table(num_heads, head_offset)


def _dilated(pattern: Pattern, seq_len: int) -> Dilated:
    """The dilated factor of a pattern; a block layout alone has one segment of all tokens."""
    if isinstance(pattern, BlockLayout):
        return Dilated((max(seq_len, 1),), (1,))
    return pattern.dilated if isinstance(pattern, Product) else pattern


def _work(dilated: Dilated, q: Tensor) -> int:
    """About how many score entries times head_dim: of a head's tokens 1 / r take part in a branch, and see w / r."""
    rows = sum(
        min(w, q.shape[1]) // r**2 + 1 for w, r in zip(dilated.segment_lengths, dilated.dilation_rates, strict=True)
    )
    return rows * q.numel()


def _layouts(
    pattern: Pattern,
    q: Tensor,
    kv_heads: int,
    seq_len: int,
    offsets: tuple[tuple[int, ...], ...],
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> list[BlockLayout]:
    """The layouts inside the segments of a call, one for each number of tokens that they have; none without blocks."""
    if isinstance(pattern, Dilated):
        return []
    if isinstance(pattern, BlockLayout):
        # Packed samples have the layout of their first tokens, whatever their common length.
        pattern.check(q.shape[0], seq_len if cu_seqlens is None else pattern.seq_len, q.shape[2], kv_heads)
        found = [pattern]
    else:
        dilated = pattern.dilated
        counts: set[int] = set()
        for _, seq in autograd.samples(seq_len, lengths, cu_seqlens):
            counts |= row_counts(dilated.segment_lengths, dilated.dilation_rates, offsets, seq.stop - seq.start)
        found = [pattern.layout_of(count) for count in sorted(counts)]
        for layout in found:
            layout.check(1, layout.seq_len, q.shape[2], kv_heads)
    return found


def _dense_layouts(layouts: list[BlockLayout], heads: int) -> Callable[[int, int], Tensor]:
    """For the oracle: which of n tokens sees which, per head; a shorter ragged sample has the first tokens' lists."""
    layouts = [layout.for_heads(heads) for layout in layouts]
    masks = {layout.seq_len: layout.dense_mask().cpu() for layout in layouts}
    longest = max(layouts, key=lambda layout: layout.seq_len)

    def visible(sample: int, length: int) -> Tensor:
        if length not in masks:
            masks[length] = longest.prefix(length).dense_mask().cpu()
        mask = masks[length]
        return mask[sample if len(mask) > 1 else 0]

    return visible


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What autocast does for `scaled_dot_product_attention`: everything but double precision is cast."""
    if not isinstance(q, Tensor):
        return q, k, v
    device = q.device.type
    known = device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)
    if not (known and torch.is_autocast_enabled(device)):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions, (batch, seq, heads, head_dim); got shape {tuple(x.shape)}"
            )
        if x.layout is not torch.strided:
            raise ValueError(f"{name} must be a dense tensor; got layout {x.layout}: give {name}.to_dense()")
        if x.dtype != q.dtype or not x.is_floating_point():
            raise ValueError(f"q, k and v must share one floating dtype; got {name} {x.dtype} and q {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"q, k and v must be on one device; got {name} on {x.device} and q on {q.device}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape; got {tuple(k.shape)} and {tuple(v.shape)}")
    if (q.shape[0], q.shape[1], q.shape[3]) != (k.shape[0], k.shape[1], k.shape[3]):
        raise ValueError(
            f"q and k must agree in batch, seq and head_dim; got {tuple(q.shape)} and {tuple(k.shape)}, "
            "read as (batch, seq, heads, head_dim)"
        )
    if q.shape[3] == 0:
        raise ValueError(f"q must have head_dim of at least 1; got shape {tuple(q.shape)}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"the heads of k and v must divide those of q; got {q.shape[2]} query and {k.shape[2]} key-value heads"
        )
    heads = q.shape[2]
    # No model has as many heads, each with keys of its own; decoding, whose seq is 1, has fewer.
    if heads >= 256 and heads > 8 * q.shape[1] and heads == k.shape[2] and not torch.compiler.is_compiling():
        warnings.warn(
            f"q of shape {tuple(q.shape)} is read as (batch, seq, heads, head_dim): {q.shape[1]} tokens of {heads} "
            "heads. If it is (batch, heads, seq, head_dim), as scaled_dot_product_attention has it, give "
            "q.transpose(1, 2), k.transpose(1, 2) and v.transpose(1, 2)",
            stacklevel=4,
        )


def _check_ragged(q: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if lengths is not None and cu_seqlens is not None:
        raise ValueError("lengths and cu_seqlens both given; lengths is for padded batches, cu_seqlens for packed ones")
    if lengths is not None:
        lengths = _integers("lengths", lengths, f"{q.shape[0]} integers, one per batch row")
        if lengths.shape != q.shape[:1] or lengths.is_floating_point() or lengths.dtype == torch.bool:
            raise ValueError(
                f"lengths must be {q.shape[0]} integers, one per batch row; "
                f"got {lengths.dtype} of shape {tuple(lengths.shape)}"
            )
    if cu_seqlens is not None:
        cu_seqlens = torch.as_tensor(cu_seqlens)
        if (
            cu_seqlens.dim() != 1
            or not len(cu_seqlens)
            or cu_seqlens.is_floating_point()
            or cu_seqlens.dtype == torch.bool
        ):
            raise ValueError(
                f"cu_seqlens must be (samples + 1,) integers; got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
            )
        if q.shape[0] != 1:
            raise ValueError(f"cu_seqlens packs samples along seq and needs batch 1; got batch {q.shape[0]}")
    return lengths, cu_seqlens


def _integers(name: str, values: Any, wanted: str) -> Tensor:
    if isinstance(values, Tensor):
        return values
    if not isinstance(values, Sequence) or not all(isinstance(value, int) for value in values):
        raise ValueError(f"{name} must be {wanted}; got {values!r}")
    return torch.tensor(values)


def _check_mask(q: Tensor, key_padding_mask: Tensor | None) -> None:
    if key_padding_mask is None:
        return
    if not isinstance(key_padding_mask, Tensor) or key_padding_mask.dtype != torch.bool:
        kind = key_padding_mask.dtype if isinstance(key_padding_mask, Tensor) else type(key_padding_mask).__name__
        raise ValueError(f"key_padding_mask must be a bool tensor, True where a key is ignored; got {kind}")
    if key_padding_mask.shape != q.shape[:2]:
        raise ValueError(
            f"key_padding_mask must have shape (batch, seq) = {tuple(q.shape[:2])}; got {tuple(key_padding_mask.shape)}"
        )
    if key_padding_mask.device != q.device:
        raise ValueError(f"key_padding_mask must be on q's device, {q.device}; got {key_padding_mask.device}")


@dataclass(frozen=True)
class Explanation:
    """What a call would do. Prints as a table.

    Attributes:
        backend, reason: the backend that would serve the call, and why.
        refusals: why each other backend would not.
        groups: the strided groups of the plan, in order of execution.
        flops: of the forward: 4 head_dim a score entry. Of several ranks' calls, flops and bytes are those of the
            groups before block layouts thin them out.
        bytes: that the forward must move at least in the device's memory: rows of q, k and v read, and of out and lse
            read and written, per group, or per call inside a layout.
        calls: inside the block layout of each number of tokens that a segment has, what the native backend runs.
        transport: with a mesh, how rows travel, why, and why not otherwise.
        exchange: with a mesh, what this rank sends and receives.
        unserved: a line for each branch in which some tokens take part for no head.
    """

    backend: str
    reason: str
    refusals: dict[str, str]
    groups: tuple[StridedGroup, ...]
    flops: int
    bytes: int
    calls: dict[int, tuple[blocks.Calls, ...]]
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
            lines.append("rows    queries  keys     keys are  diagonal  written")
            for call in calls:
                keys, cut = "copied" if call.copied else "viewed", "cuts" if call.masked else ""
                how = "directly" if call.first else "merged"
                lines.append(f"{call.rows:<7} {call.queries:<8} {call.keys:<8} {keys:<9} {cut:<9} {how}")
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    compat: str | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    backend: str = "auto",
    mesh: Any = None,
    seq_len: int | None = None,
    head_offset: int = 0,
    transport: str = "auto",
) -> Explanation:
    """What `attention(q, k, v, pattern, ...)` would do, without doing it; meta tensors serve as well.

    Arguments and errors as in `dilated_attention`. With a mesh the groups are this rank's, over its own rows and over
    those that it receives.
    """
    q, k, v = _autocast(q, k, v)
    _check_tensors(q, k, v)
    context = None if mesh is None else _context(mesh)
    seq_len = _sequence_length(q, seq_len, context, transport)
    _check_mask(q, key_padding_mask)
    _check_options(pattern, is_causal, scale, dropout_p)
    dilated = _dilated(pattern, seq_len)
    choice = _choose(backend, q, pattern, dilated, dropout_p, key_padding_mask)
    _check_mesh(context, choice.backend, dropout_p, key_padding_mask)
    offsets = offset_table(dilated, compat, k.shape[2], head_offset)
    chosen, exchange = None, None
    found = _layouts(pattern, q, k.shape[2], seq_len, offsets, None, None)
    layouts = {x.seq_len: x.causal() if is_causal else x for x in found}
    calls = {length: blocks.calls(layout) for length, layout in sorted(layouts.items(), reverse=True)}
    if context is None or context.size == 1:
        groups = plan_dilated(dilated.segment_lengths, dilated.dilation_rates, offsets, seq_len, compat).groups
    else:
        from dilated_attention.parallel import traffic
        from dilated_attention.parallel.partition import Sharding, balanced_bounds, rank_groups

        sharding = Sharding(
            dilated.segment_lengths, dilated.dilation_rates, offsets, balanced_bounds(seq_len, context.size), is_causal,
            None, compat, tuple(layout.for_heads(q.shape[2]) for layout in layouts.values()),
        )  # fmt: skip
        shape = traffic.Shape(q.shape[0], q.shape[2], q.shape[3], q.dtype)
        chosen = traffic.choose(transport, sharding, shape)
        exchange = traffic.count(chosen.transport, sharding, context.rank, shape)
        groups = rank_groups(sharding, context.rank)
        layouts = {}  # the groups are counted as if no layout thinned them out
    ratio, row = q.shape[2] // k.shape[2], q.shape[3] * q.element_size()
    pairs, moved = 0, 0
    for group in groups:
        problems, queries, keys = group.queries.segments * q.shape[0], group.queries.count, group.keys.count
        written = 1 if group.first else 2  # a merge reads what it changes
        if not layouts:
            pairs += q.shape[0] * ratio * group.entries(is_causal)
            moved += problems * group.heads * (queries * ratio * (row + written * (row + 4)) + keys * 2 * row)
            continue
        heads = [(group.head + i * group.head_stride) * ratio + j for i in range(group.heads) for j in range(ratio)]
        layout = layouts[queries].for_heads(q.shape[2])
        layout = layout.select(heads=heads) if layout.num_heads > 1 else layout
        each = problems * len(heads) // (layout.batch_size * layout.num_heads)
        pairs += each * int(layout.seen.sum())
        for call in blocks.calls(layout):
            read = call.queries * row + call.keys * 2 * row
            moved += each * call.rows * (read + (1 if call.first else 2) * written * call.queries * (row + 4))
    flops = 4 * q.shape[3] * pairs
    unserved = describe_unserved(dilated, offsets)
    return Explanation(
        choice.backend, choice.reason, choice.refusals, groups, flops, moved, calls, chosen, exchange, unserved
    )
