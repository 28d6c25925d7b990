"""Define the differentiable operator, for one device and for a mesh.

`dilated_attention::forward` and `::backward` are custom operators with fake implementations, so that
`torch.compile(fullgraph=True)`, `torch.export` and `torch.func` see one opaque step. Operators take numbers, strings
and tensors: `_pack` and `_unpack` alone know how a `Call` becomes these. The plan is made inside the operator, for the
length of its tensors. Only q, k, v, out and lse are saved for the backward, and over a mesh the rows of other ranks
that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention import execution
from dilated_attention.backends.table import BACKENDS, Choice
from dilated_attention.call import Call, Shards, as_one_width
from dilated_attention.errors import UnsupportedError
from dilated_attention.layout import BlockLayout
from dilated_attention.merge import running
from dilated_attention.parallel import over_mesh
from dilated_attention.plan import WHOLE, Branches
from dilated_attention.scores import Scores
from dilated_attention.torch_internals import (
    BelowAutograd,
    in_batched_gradients,
    in_forward_mode,
    in_torch_func,
    not_traced,
    observed,
    without_autocast,
)

_CALL = "SymInt[] numbers, float[] scores, str[] words, Tensor[] layouts, Tensor?[] attached"
ATTACHED = (
    "lengths", "cu_seqlens", "key_padding_mask", "seed", "coordinates", "buckets", "query_tokens", "key_tokens",
)  # fmt: skip
"""The fields of a `Call` that are tensors without a gradient or None, in the order in which the operators take them."""

torch.library.define("dilated_attention::forward", f"(Tensor q, Tensor k, Tensor v, Tensor? bias, {_CALL}) -> Tensor[]")
torch.library.define(
    "dilated_attention::backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor out, Tensor lse, Tensor[] saved, "
    f"bool of_bias, {_CALL}) -> Tensor[]",
)


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return out, shaped like q but with the head_dim of v, and lse, `(batch, seq, heads)`; differentiable."""
    head_dim = v.size(3)
    if head_dim == q.size(3):
        return _attend(q, k, v, call)
    out, lse = _attend(*as_one_width(q, k, v), call)
    return out[..., :head_dim], lse


def _attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    if call.repeats is not None and not _differentiated(q, k, v):
        repeated = execution.repeat(call, q, k, v)
        if repeated is not None:
            return repeated
    if call.backend.attend is not None:
        return execution.attend(call, q, k, v)
    # A mask, or lengths, may be written to before the backward: the operator saves them.
    repeats = call.repeats is not None and call.key_padding_mask is None and call.lengths is None
    if repeats and not in_forward_mode() and _differentiated(q, k, v):
        return _Repeated.apply(q, k, v, call)
    eager = not (torch.compiler.is_compiling() or in_torch_func() or q.is_meta)  # else recorded in a graph
    inputs = (q, k, v) if call.bias is None else (q, k, v, call.bias)
    if eager and call.shards is not None and torch.is_grad_enabled():
        wanted = _differentiated(*inputs)
        if over_mesh.gradients_wanted(call, q, k, wanted) and not wanted:
            q = q.detach().requires_grad_()  # so that this rank takes part in the backward of the others
            inputs = (q, *inputs[1:])
    if eager and not (_differentiated(*inputs) or observed(*inputs)):
        out, lse, *_ = _run(call, q, k, v)  # nobody looks at the operator, which takes a tenth of a small call's time
        return out, lse
    operator = _Attention.apply if in_torch_func() else torch.ops.dilated_attention.forward
    out, lse, *_ = operator(q, k, v, call.bias, *_pack(call))
    return out, lse


def _differentiated(*tensors: Tensor) -> bool:
    """Return whether a derivative with respect to some of these tensors may be computed, forward mode included, whose
    tangents the bare operator would silently drop."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x.requires_grad:
                return True
    return in_forward_mode()


def _pack(call: Call) -> tuple[Any, ...]:
    """Return a call, without its bias tensor, as the last arguments of the operators.

    Its integers become one list (`numbers`), its strings another (`words`), the tensors of its layouts a third.
    """
    branches = call.branches
    shards = call.shards
    numbers = [int(call.is_causal), call.first_head, int(call.placed), *call.starts]
    numbers.append(int(branches.compat is not None))
    numbers += (len(branches.offsets), len(branches.bands))
    bands: list[int] = []
    for low, high in branches.bands:
        bands += (WHOLE if low is None else low, WHOLE if high is None else high)
    for row in (branches.segment_lengths, branches.dilation_rates, *branches.offsets, bands, branches.leading):
        numbers += row
    words = [call.backend.name]
    if shards is not None:
        words += (shards.group_name, shards.transport, shards.layer)
        words += ["sinks"] * shards.sinks + ["gradients"] * shards.gradients
        for edges in (shards.bounds, shards.samples or (), shards.lengths, shards.widths):
            numbers += (len(edges), *edges)
    for x in call.layouts:
        numbers += (x.seq_len, x.q_block, x.k_block, int(x.is_causal), len(x.tables))
    tables: list[Tensor] = []
    for x in call.layouts:
        tables += x.tables
    return numbers, list(call.scores), words, tables, [getattr(call, name) for name in ATTACHED]


def _unpack(k: Tensor, bias: Tensor | None, packed: Sequence[Any]) -> Call:
    """Return the call that `_pack` packed, with its bias tensor; k gives the number of KV heads."""
    numbers, scores, words, tables, attached = packed
    read = _read(tuple(numbers), k.shape[2], _of_mesh(words))
    rest = iter(tables)
    layouts = []
    for seq_len, q_block, k_block, is_causal, count in read.sizes:
        indptr, indices, *inside = islice(rest, count)
        layouts.append(BlockLayout(indptr, indices, seq_len, q_block, k_block, bool(is_causal), *inside))
    shards = None
    if _of_mesh(words):
        group, transport, layer = words[1:4]
        shards = Shards(
            group, read.bounds, read.samples, transport, layer, read.lengths, "sinks" in words[4:], read.widths,
            "gradients" in words[4:],
        )  # fmt: skip
    return Call(
        read.branches, Choice(BACKENDS[words[0]]), tuple(layouts), read.is_causal, Scores(*scores),
        first_head=read.first_head, shards=shards, starts=read.starts, placed=read.placed, bias=bias,
        **dict(zip(ATTACHED, attached, strict=True)),
    )  # fmt: skip


def _of_mesh(words: Sequence[str]) -> bool:
    """Return whether the words that `_pack` returned belong to a call over a mesh. A call on one device has one, its
    backend."""
    return len(words) > 1


class _Numbers(NamedTuple):
    branches: Branches
    is_causal: bool
    first_head: int
    placed: bool
    starts: tuple[int, int]
    bounds: tuple[int, ...]
    samples: tuple[int, ...] | None
    lengths: tuple[int, ...]
    widths: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=64)  # few: an entry holds the edges of all samples that a call over a mesh packs
def _read(numbers: tuple[int, ...], kv_heads: int, over_mesh: bool) -> _Numbers:
    rest = iter(numbers)

    def take(count: int) -> tuple[int, ...]:
        return tuple(islice(rest, count))

    is_causal, first_head, placed, q_start, k_start, compat, count, banded = take(8)
    segment_lengths = take(count)
    dilation_rates = take(count)
    offsets = tuple([take(kv_heads) for _ in range(count)])
    limits = [None if limit == WHOLE else limit for limit in take(2 * banded)]
    bands = tuple(zip(limits[::2], limits[1::2], strict=True))
    leading = take(banded)
    branches = Branches(segment_lengths, dilation_rates, offsets, "torchscale" if compat else None, bands, leading)
    bounds, samples, lengths, widths = (take(next(rest)) if over_mesh else () for _ in range(4))
    left = tuple(rest)
    sizes = tuple([left[i : i + 5] for i in range(0, len(left), 5)])
    return _Numbers(
        branches, bool(is_causal), first_head, bool(placed), (q_start, k_start), bounds, samples or None, lengths,
        widths, sizes,
    )  # fmt: skip


@torch.library.impl("dilated_attention::forward", "CompositeExplicitAutograd")
def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *packed: Any) -> list[Tensor]:
    """Return out, shaped like q and contiguous, and lse, `(batch, seq, heads)`; over a mesh then other ranks' rows,
    which the backward needs."""
    return _run(_unpack(k, bias, packed), q, k, v)


@not_traced
def _run(call: Call, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    with without_autocast(q):  # it has cast q, k and v; scores and sums are wider
        factor, _ = call.scores.split()
        q = q if factor == 1 else q * factor
        return (execution if call.shards is None else over_mesh).forward(call, q, k, v)


@torch.library.register_fake("dilated_attention::forward")
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *packed: Any) -> list[Tensor]:
    if torch.onnx.is_in_onnx_export():
        raise UnsupportedError(
            "ONNX has no operator for this attention. Before the export, call "
            "model.set_attn_implementation('sdpa') on a transformers model that computes its own attention; otherwise "
            "pass backend='reference'"
        )
    results = [*running(q, covered=True)]
    numbers, _, words, *_ = packed
    if not _of_mesh(words):
        return results
    call = _unpack(k, bias, ([int(x) for x in numbers], *packed[1:]))
    return [*results, *over_mesh.empty_saved(call, q, k)]


@torch.library.impl("dilated_attention::backward", "CompositeExplicitAutograd")
def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    saved: list[Tensor], of_bias: bool, *packed: Any,
) -> list[Tensor]:  # fmt: skip
    """Return [dq, dk, dv], contiguous, and with `of_bias` the gradient of the bias tensor, from what
    `dilated_attention::forward` returned: out, lse and then `saved`."""
    return _run_backward(_unpack(k, bias, packed), dout, dlse, q, k, v, [out, lse, *saved], of_bias)


@not_traced
def _run_backward(
    call: Call, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, results: list[Tensor],
    of_bias: bool = False,
) -> list[Tensor]:  # fmt: skip
    with without_autocast(q):
        factor, _ = call.scores.split()
        q = q if factor == 1 else q * factor
        bias = call.bias_source()
        if of_bias:
            assert bias is not None
            bias = bias.with_sums()
        place = execution if call.shards is None else over_mesh
        dq, dk, dv = place.backward(call, bias, dout, dlse, q, k, v, results)
        gradients = [dq if factor == 1 else dq.mul_(factor), dk, dv]
        if of_bias:
            assert bias is not None
            gradients.append(bias.gradient)
        return gradients


@torch.library.register_fake("dilated_attention::backward")
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    saved: list[Tensor], of_bias: bool, *packed: Any,
) -> list[Tensor]:  # fmt: skip
    gradients = [q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)]
    if of_bias:
        assert bias is not None
        gradients.append(bias.new_empty(bias.shape))
    return gradients


def _not_fused(order: str, words: Sequence[str]) -> Exception:
    if _of_mesh(words):
        return UnsupportedError(f"{order} derivatives of context parallel attention are not supported")
    return NotImplementedError(
        f"{order} derivatives of attention are not fused; "
        'call with backend="reference", which differentiates any number of times, forward and backward'
    )


class _Attention(torch.autograd.Function):
    """Run `dilated_attention::forward` with its gradient."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *packed: Any) -> tuple[Tensor, ...]:
        with BelowAutograd():
            return tuple(torch.ops.dilated_attention.forward(q, k, v, bias, *packed))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, bias, *options, layouts, attached = inputs
        ctx.save_for_backward(q, k, v, bias, *output, *attached, *layouts)
        ctx.mark_non_differentiable(*output[2:])
        ctx.outputs = len(output)
        ctx.options = options
        ctx.words = options[-1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, lse, *rest = ctx.saved_tensors
        saved = rest[: ctx.outputs - 2]
        rest = rest[ctx.outputs - 2 :]
        attached = rest[: len(ATTACHED)]
        layouts = rest[len(ATTACHED) :]
        if dout is None:
            dout = torch.zeros_like(out)
        of_bias = ctx.needs_input_grad[3]
        gradients = _apply_backward(
            dout, dlse, q, k, v, bias, out, lse, saved, of_bias, *ctx.options, layouts, attached
        )  # fmt: skip
        return (*gradients, *(None,) * (len(ctx.options) + 6 - len(gradients)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        raise _not_fused("forward-mode", ctx.words)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        operator = torch.ops.dilated_attention.forward
        return _in_batch(operator, _Attention.apply if in_torch_func() else operator, info, in_dims, arguments)


class _Repeated(torch.autograd.Function):
    """Run a `remembered` call with its gradient. Nobody looks at its operators, which take the host longer."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, ...]:
        out, lse = execution.repeat(call, q, k, v) or _run(call, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        for layout in ctx.call.layouts:
            layout.require_unchanged()
        traced = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if traced or in_batched_gradients(dout, dlse) or observed(dout, dlse):
            return *_apply_backward(dout, dlse, q, k, v, None, out, lse, [], False, *_pack(ctx.call)), None
        return *_run_backward(ctx.call, dout, dlse, q, k, v, [out, lse]), None


def _apply_backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    """Run `dilated_attention::backward` in whatever differentiates or maps over it."""
    apply = _AttentionBackward.apply if in_torch_func() else torch.ops.dilated_attention.backward
    if not in_torch_func() and in_batched_gradients(dout, dlse):
        raise UnsupportedError(
            "is_grads_batched=True, and with it jacobian(vectorize=True), is not supported for attention; use "
            "torch.func.jacrev or torch.func.vmap, or compute one gradient at a time"
        )
    return apply(dout, dlse, *arguments)


class _AttentionBackward(torch.autograd.Function):
    """Run `dilated_attention::backward`, which has no gradient."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        with BelowAutograd():
            return tuple(torch.ops.dilated_attention.backward(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *_, ctx.words, _layouts, _attached = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise _not_fused("second", ctx.words)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        raise _not_fused("second", ctx.words)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _in_batch(torch.ops.dilated_attention.backward, _AttentionBackward.apply, info, in_dims, arguments)


def _differentiable(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *packed: Any) -> list[Tensor]:
    inputs = (q, k, v) if bias is None else (q, k, v, bias)
    if _differentiated(*inputs):
        return list(_Attention.apply(q, k, v, bias, *packed))
    with BelowAutograd():  # binding a Function's arguments is a third of a small call's overhead
        return torch.ops.dilated_attention.forward(q, k, v, bias, *packed)


torch.library.impl("dilated_attention::forward", "Autograd")(_differentiable)
torch.library.impl("dilated_attention::backward", "Autograd")(lambda *x: list(_AttentionBackward.apply(*x)))


def _in_batch(
    operator: Any, run: Any, info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Call `run`, which runs an operator, with the dimension that `torch.func.vmap` maps folded into the batch. Raises
    UnsupportedError for a mesh, `cu_seqlens`, lists per batch element, and dropout with one seed for all."""
    size = info.batch_size
    schema = operator.default._schema.arguments
    given = dict(zip([argument.name for argument in schema], zip(arguments, in_dims, strict=True), strict=True))
    batch = _sizes(*given["q"])[0]
    folded: list[Any] = []
    for name, (x, dim) in given.items():
        if name == "words" and _of_mesh(x):
            raise UnsupportedError("mesh under torch.func.vmap: fold the mapped dimension into the batch")
        if name == "layouts" and any(len(table) > 1 for table in x if _is_indptr(table)):
            raise UnsupportedError("layout has lists per batch element: under torch.func.vmap they must be shared")
        if name == "attached":
            named = zip(ATTACHED, x, dim, strict=True)
            x = [_folded(each_name, each, axis, size, batch) for each_name, each, axis in named]
        elif isinstance(x, Tensor):
            x = _folded(name, x, dim, size, batch)
        folded.append(x)

    unfolded = [x.unflatten(0, (size, len(x) // size)) for x in run(*folded)]
    if given.get("of_bias", (False, None))[0] and _sizes(*given["bias"])[0] == 1:  # all batch elements share it
        unfolded[3] = unfolded[3].sum(1, keepdim=True)
    return tuple(unfolded), (0,) * len(unfolded)


def _is_indptr(table: Tensor) -> bool:
    """Return whether a table of a layout has one entry per batch element: indptr has three dimensions, and so have only
    the booleans of masks."""
    return table.ndim == 3 and table.dtype == torch.int64


def _sizes(x: Tensor, dim: int | None) -> list[int]:
    """Return the shape of a tensor without the dimension `dim`, which vmap maps."""
    sizes = list(x.shape)
    if dim is not None:
        del sizes[dim]
    return sizes


def _folded(name: str, x: Tensor | None, dim: int | None, size: int, batch: int) -> Tensor | None:
    """Return a tensor of an operator with the dimension `dim`, which vmap maps, folded into its batch. `batch`: the
    batch of q without it."""
    if x is None:
        return None
    if name == "cu_seqlens":
        raise UnsupportedError("cu_seqlens under torch.func.vmap: samples are packed one after another already")
    if name in ("buckets", "query_tokens", "key_tokens"):
        if dim is not None:
            raise UnsupportedError(f"{name} of a bias are mapped by torch.func.vmap: they must be shared")
        return x
    if name == "seed":
        if dim is None:  # pairs are chosen by their place in the batch, which folding changes
            raise UnsupportedError('dropout under torch.func.vmap: only with randomness="different"')
        return x.movedim(dim, 0)[0]
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    if name in ("bias", "coordinates"):
        x = x.expand(size, batch, *x.shape[2:])
    return x.flatten(0, 1)
