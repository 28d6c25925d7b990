"""Make selectors: functions that choose blocks from q and k, for ragged batches too, and in graphs as one operator."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from dilated_attention import checks
from dilated_attention.errors import UnsupportedError
from dilated_attention.layout import BlockLayout
from dilated_attention.layout.spans import BlockGrid
from dilated_attention.routing.grid import candidates
from dilated_attention.torch_internals import constant_when_traced, fixed, taken_as_true, without_autocast

Choose = Callable[..., BlockLayout]

choosers: dict[str, Choose] = {}
"""The selectors, and the choices of layers, that the operator runs, by name."""

torch.library.define(
    "dilated_attention::choose",
    "(Tensor q, Tensor k, Tensor? lengths, Tensor? cu_seqlens, Tensor? key_padding_mask, SymInt seq_len, "
    "str selector, str options) -> (Tensor, Tensor)",
)


def selector(choose: Choose) -> Choose:
    """Turn a function of q, k and options into a selector.

    It chooses without gradients, and without autocast: shares keep their dtype. It takes `lengths`, `cu_seqlens` and
    `key_padding_mask` too, as `attention` does, and then chooses in each sample by itself, so that padding is never
    chosen and a sample's lists are those that it gets alone. Graphs of `torch.compile` and `torch.export` hold one
    operator in its place. In its signature the options of `candidates` replace `**options`.
    """
    signature = inspect.signature(choose)
    own = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
    if len(own) < len(signature.parameters):
        own += [x for x in inspect.signature(candidates).parameters.values() if x.kind is x.KEYWORD_ONLY]
        signature = signature.replace(parameters=own)
    kinds = {"lengths": "Tensor | Sequence[int] | None", "cu_seqlens": "Tensor | Sequence[int] | None"}
    kinds["key_padding_mask"] = "Tensor | None"
    ragged = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in kinds.items()
    ]
    choosers[choose.__name__] = choose

    @wraps(choose)
    def chosen(
        *arguments: Any, lengths: Any = None, cu_seqlens: Any = None, key_padding_mask: Any = None, **options: Any
    ) -> BlockLayout:
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        given = bound.arguments
        q = given.pop("q")
        k = given.pop("k")
        checks.not_mapped(choose.__name__, q, k)
        if not all(isinstance(x, Tensor) and x.ndim == 4 and not x.is_meta for x in (q, k)):
            return choose(q, k, **given)  # which says what is wrong
        lengths, cu_seqlens = checks.ragged_or_masked(k, lengths, cu_seqlens, key_padding_mask)
        if torch.compiler.is_compiling():
            return in_graph(choose.__name__, q, k, lengths, cu_seqlens, key_padding_mask, given)
        return _choose(choose, q, k, lengths, cu_seqlens, key_padding_mask, given)

    chosen.__signature__ = signature.replace(parameters=[*own, *ragged])  # type: ignore[attr-defined]
    return chosen


@constant_when_traced
def _as_text(options: dict[str, Any]) -> str:
    return json.dumps(options)


def in_graph(
    name: str, q: Tensor, k: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, mask: Tensor | None,
    options: dict[str, Any],
) -> BlockLayout:  # fmt: skip
    options = {option: fixed(value) for option, value in options.items()}
    seq_len = q.shape[1]
    if cu_seqlens is not None:
        seq_len = int(cu_seqlens.diff().max())
        taken_as_true(seq_len >= 1)
    grid = BlockGrid.of(seq_len, options["block_size"], options["is_causal"])
    indptr, indices = torch.ops.dilated_attention.choose(
        q.detach(), k.detach(), lengths, cu_seqlens, mask, seq_len, name, _as_text(options)
    )
    return BlockLayout(indptr, indices, grid.seq_len, grid.q_block, grid.k_block, grid.is_causal)


@torch.library.impl("dilated_attention::choose", "CompositeExplicitAutograd")
def _(
    q: Tensor, k: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, mask: Tensor | None, seq_len: int,
    name: str, options: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if name not in choosers:
        raise RuntimeError(f"the program chooses blocks by {name!r}, which is not loaded: import dilated_attention.nn")
    layout = _choose(choosers[name], q, k, lengths, cu_seqlens, mask, json.loads(options))
    return layout.indptr, layout.indices


@torch.library.register_fake("dilated_attention::choose")
def _(
    q: Tensor, k: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, mask: Tensor | None, seq_len: int,
    name: str, options: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if torch.onnx.is_in_onnx_export():
        raise UnsupportedError("ONNX has no operator that chooses blocks; use torch.export instead")
    given = json.loads(options)
    rows = BlockGrid.of(seq_len, given["block_size"], given["is_causal"]).rows
    lists = (k if given.get("per_kv_head") else q).shape[2]
    batch = q.shape[0]
    if cu_seqlens is not None:
        batch = cu_seqlens.shape[0] - 1
    blocks = torch.library.get_ctx().new_dynamic_size(min=0)
    return q.new_empty(batch, lists, rows + 1, dtype=torch.int64), q.new_empty(blocks, dtype=torch.int64)


def _choose(
    choose: Choose, q: Tensor, k: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, mask: Tensor | None,
    options: dict[str, Any],
) -> BlockLayout:  # fmt: skip
    """Return the layout that `choose` returns, of each sample by itself where the batch is ragged."""
    with torch.no_grad(), without_autocast(q):
        if not (len(q) or len(k)):  # an empty batch: make the lists of a batch of one, and select none of them
            return choose(*(x.new_zeros(1, *x.shape[1:]) for x in (q, k)), **options).select(batch=[])
        if mask is not None:
            lengths = _lengths_of(mask)
        if lengths is None and cu_seqlens is None:
            return choose(q, k, **options)
        layouts = []
        for batch, seq in checks.samples(q.shape[1], lengths, cu_seqlens):
            some_q = q[batch, seq]
            some_k = k[batch, seq]
            if seq.start == seq.stop:  # an empty sample: make the lists of one token
                some_q = q.new_zeros(1, 1, *q.shape[2:])
                some_k = k.new_zeros(1, 1, *k.shape[2:])
            layouts.append(choose(some_q, some_k, **options))
        return BlockLayout.stack(layouts, seq_len=None if lengths is None else q.shape[1])


def _lengths_of(key_padding_mask: Tensor) -> Tensor:
    """Return how many tokens each sample has before its padding; ValueError where a token follows a hidden one."""
    lengths = (~key_padding_mask).sum(1)
    hidden_end = torch.arange(key_padding_mask.shape[1], device=lengths.device) >= lengths[:, None]
    if not torch.equal(hidden_end, key_padding_mask):
        sample = int((hidden_end != key_padding_mask).any(1).nonzero()[0])
        raise ValueError(
            f"key_padding_mask must hide the end of each sample only; got a hidden token before others in "
            f"sample {sample}. Pack the tokens that are not hidden, x[~key_padding_mask][None], and give cu_seqlens"
        )
    return lengths
