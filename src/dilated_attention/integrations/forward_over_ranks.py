"""Compute the attention layers of a transformers model whose sequence is sharded over ranks.

`over_ranks` makes a `Forward` when a model's forward begins. The mask function puts it into the layers' `Shown`, so
that it also reaches a layer that is recomputed in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from transformers import masking_utils

from dilated_attention import BlockLayout, Dilated, UnsupportedError
from dilated_attention.integrations.chosen_keys import attend_chosen, that_are_shown
from dilated_attention.integrations.own_attention import Chosen, Shown, attended, pattern_of_shown
from dilated_attention.integrations.pair_masks import BLOCK
from dilated_attention.plumbing import Link, context_group, fetch_listed, link_of

LAYER = "_layer_over_ranks"
"""The attribute in which an attention layer or an indexer of such a model holds its name."""


def layer_name(module: nn.Module) -> str | None:
    """Return the name of an attention layer or an indexer of a model over a mesh; None: it is of another model."""
    return module.__dict__.get(LAYER)


@dataclass(frozen=True, eq=False)
class Keys:
    """Hold keys and values `(batch, rows, kv_heads, head_dim)` of a layer; `first` is the position of the first."""

    k: Tensor
    v: Tensor
    first: int

    def followed_by(self, k: Tensor, v: Tensor) -> Keys:
        return Keys(torch.cat([self.k, k], 1), torch.cat([self.v, v], 1), self.first)


@dataclass
class OverRanks:
    """Hold how a model runs over ranks.

    Attributes:
        seq_len: the global length that every batch must have; None: any.
        finds_packed: whether the model makes masks of packed samples from position_ids that restart.
        is_dilated: whether some layer has a dilated pattern.
        chooses: whether some layer lists the keys of each query.
        runs_are_blocks: which marked tokens see one another, as `Probe` found.
        takes_images: whether the model takes images beside tokens.
        left_sums: whether a forward returned the losses of this rank's tokens, for the caller to add up.
        kept: where a forward leaves the keys of this rank that later tokens see, by layer; None: nowhere.
    """

    mesh: DeviceMesh
    transport: str
    seq_len: int | None
    finds_packed: bool
    is_dilated: bool
    chooses: bool
    runs_are_blocks: bool | None
    takes_images: bool
    left_sums: bool = False
    kept: dict[nn.Module, Keys] | None = None

    @property
    def link(self) -> Link:
        return link_of(context_group(self.mesh))

    def is_of(self, mesh: DeviceMesh, transport: str, seq_len: int | None) -> bool:
        return (self.mesh, self.transport, self.seq_len) == (mesh, transport, seq_len)


@dataclass(eq=False)
class Forward:
    """Hold what the layers of one forward share.

    Attributes:
        bounds: the edges of the ranks' shards.
        samples: for each row of the batch, the edges of its packed samples in the whole sequence; None: not packed.
        places: `(batch, seq)`, the positions of all ranks' tokens, where they are packed; otherwise None.
        hidden: `(batch, seq)`, True for padding, of all ranks' tokens; None: no padding.
        last_position: the greatest of all ranks' position_ids.
        wants_loss, made_loss: whether labels were given, and whether their global mean was computed.
    """

    model: nn.Module
    over: OverRanks
    bounds: tuple[int, ...]
    samples: list[list[int]] | None = None
    places: Tensor | None = None
    hidden: Tensor | None = None
    last_position: int = 0
    wants_loss: bool = False
    made_loss: bool = False

    def __post_init__(self) -> None:
        rank = self.over.link.rank
        self.seq_len = self.bounds[-1]
        self.start = self.bounds[rank]
        self.stop = self.bounds[rank + 1]

    @property
    def ends_with_padding(self) -> bool:
        """Return whether in every row all padding follows the tokens, so that no token of a causal layer sees it."""
        return self.hidden is None or not (self.hidden[:, :-1] & ~self.hidden[:, 1:]).any()

    def described(self, shown: Shown) -> Shown:
        """Return what a mask of this rank's shard shows, placed in the whole sequence."""
        shown = replace(shown, q_start=self.start, k_start=self.start, ranks=self)
        if shown.blocks is None:
            return shown
        is_plain = shown.is_causal and shown.chunk is shown.samples is self.samples is self.over.kept is None
        if not is_plain or self.over.runs_are_blocks is None:
            raise UnsupportedError(
                "a prefix or images over a mesh, in packed samples, in chunks or by a rule that is not known, are not "
                "supported: leave the mesh out"
            )
        blocks = self._numbered(shown.blocks)
        if (blocks < 0).all():
            return replace(shown, blocks=None)
        return replace(shown, blocks=None, pairs=partial(self._layout, replace(shown, blocks=blocks)))

    def _numbered(self, blocks: Tensor) -> Tensor:
        """Return the number of the block of each of all ranks' tokens, `(batch, seq)`, -1 for none. blocks: those of
        this rank, numbered in its shard."""
        link = self.over.link
        link.enter("blocks of tokens")
        rows = blocks.long().T.contiguous()
        whole = link.whole(rows, self.bounds, "while gathering blocks of tokens").T
        if not self.over.runs_are_blocks:
            return whole
        marked = whole >= 0
        begins = marked & ~F.pad(marked, (1, 0))[:, :-1]
        return begins.cumsum(1).masked_fill(~marked, -1)

    def _layout(self, shown: Shown) -> BlockLayout:
        """Return what a mask with blocks shows of the whole sequence, padding included."""
        blocks = shown.blocks
        assert blocks is not None

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own = blocks[batch, query]
            seen = (key <= query) | ((own >= 0) & (own == blocks[batch, key]))
            if shown.window is not None:
                seen = seen & (key > query - shown.window)
            if self.hidden is not None:
                seen = seen & ~self.hidden[batch, key]
            return seen

        return BlockLayout.from_mask_mod(
            sees, self.seq_len, self.seq_len, batch=len(blocks), block_size=BLOCK, device=blocks.device
        )

    def attend(
        self, shown: Shown, q: Tensor, k: Tensor, v: Tensor, layer: nn.Module, *, indices: Tensor | None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """Return what `own_attention.attend` does on one device, for this rank's shard of q, k and v.

        indices: the keys that each query of this shard lists, as in `chosen_keys.as_listed`; None: no lists.
        """
        if shown.pairs is not None:
            return attended(q, k, v, shown.layout, **options, **self._options(layer))
        if indices is not None and indices.shape[2] < self.seq_len:
            return self._attend_listed(shown, indices, q, k, v, layer, options)
        if self.over.kept is not None:
            self.over.kept[layer] = self._seen_later(shown, k, v)
        options |= self._options(layer) | {"is_causal": shown.is_causal}
        hidden = None
        if self.hidden is not None and not (shown.is_causal and self.ends_with_padding):
            hidden = self.hidden[:, self.start : self.stop]

        whole = replace(shown, q_start=0, k_start=0, queries=self.seq_len, keys=self.seq_len)
        if self.samples is not None:  # chunks begin at edges
            whole = replace(whole, chunk=None)
        pattern, _ = pattern_of_shown(whole, 0, self.seq_len)
        edges = self._edges(shown)
        if edges is None:
            return attended(q, k, v, pattern, key_padding_mask=hidden, **options)
        parts = []
        for i, of_row in enumerate(edges):
            row = slice(i, i + 1)
            mask = None if hidden is None else hidden[row]
            bounds = torch.tensor(of_row)
            part = attended(q[row], k[row], v[row], pattern, cu_seqlens=bounds, key_padding_mask=mask, **options)
            parts.append(part)
        return torch.cat(parts)

    def _attend_listed(
        self, shown: Shown, indices: Tensor, q: Tensor, k: Tensor, v: Tensor, layer: nn.Module, options: dict[str, Any]
    ) -> Tensor:
        """Return the attention of this rank's queries over the keys that they list, `(batch, shard, k)`. Only the keys
        that some query of this rank lists travel."""
        lists = that_are_shown(self._over_all_keys(shown), indices)
        k, v, lists = fetch_listed(k, v, lists, self.bounds, self.over.mesh, layer_name(layer) or "")
        return attend_chosen(Chosen(lists[:, None]), q, k, v, **options)

    def _over_all_keys(self, shown: Shown) -> Shown:
        """Return what this rank's queries see of the keys of all ranks."""
        samples = None
        if self.samples is not None:
            samples = torch.zeros(len(self.samples), self.seq_len, dtype=torch.int64, device=shown.device)
            for row, edges in zip(samples, self.samples, strict=True):
                row[edges[1:-1]] = 1
            samples = samples.cumsum(1)
        return replace(shown, samples=samples, hidden=self.hidden, k_start=0, keys=self.seq_len, ranks=None)

    def index(self, shown: Shown, indexer: nn.Module) -> tuple[Shown, _IndexCache]:
        """Return the mask that an indexer reads on this rank, and what takes the place of its cache."""
        return self._over_all_keys(shown), _IndexCache(self, layer_name(indexer) or "")

    def _seen_later(self, shown: Shown, k: Tensor, v: Tensor) -> Keys:
        """Return the keys of this rank that tokens after the sequence see."""
        first = 0
        if shown.window is not None:
            first = self.seq_len - shown.window + 1
        if shown.chunk is not None:
            first = self.seq_len // shown.chunk * shown.chunk
        first = min(max(first, self.start), self.stop)
        rows = slice(first - self.start, None)
        return Keys(k[:, rows].clone(), v[:, rows].clone(), first)

    def attend_dilated(
        self, shown: Shown, q: Tensor, k: Tensor, v: Tensor, pattern: Dilated, layer: nn.Module, **options: Any
    ) -> Tensor:
        """Return dilated attention of this rank's shard of q, k and v."""
        lengths = None if self.hidden is None else (~self.hidden).sum(1)
        options |= self._options(layer) | {"is_causal": shown.is_causal, "lengths": lengths}
        return attended(q, k, v, pattern, **options)

    def _options(self, layer: nn.Module) -> dict[str, Any]:
        name = layer_name(layer) or type(layer).__name__
        return {"mesh": self.over.mesh, "transport": self.over.transport, "seq_len": self.seq_len, "layer": name}

    def _edges(self, shown: Shown) -> list[list[int]] | None:
        """Return where the tokens of each row of the batch are cut: at packed samples, at their chunks, and before the
        first real token if chunks count from there. None: nowhere."""
        if self.samples is not None:
            if shown.chunk is None:
                return self.samples
            assert self.places is not None
            places = self.places
            if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # before transformers 5.23
                places = torch.arange(self.seq_len).expand_as(places)
            cut = []
            for row, edges in zip(places, self.samples, strict=True):
                begins = (row % shown.chunk == 0).nonzero()[:, 0].tolist()
                cut.append(sorted({*edges, *begins}))
            return cut
        if shown.chunk is None or self.hidden is None:
            return None
        first = (~self.hidden).to(torch.uint8).argmax(1).tolist()
        if not any(first):
            return None
        return [sorted({0, token, self.seq_len}) for token in first]


@dataclass(frozen=True)
class _IndexCache:
    """Take the place of an indexer's cache: the keys of all ranks are those that it holds."""

    forward: Forward
    name: str

    def update_indexer(self, new: Tensor, layer: int) -> Tensor:
        """Return the index keys of all ranks, `(batch, seq, head_dim)`. new: those of this rank."""
        link = self.forward.over.link
        link.enter(self.name)
        rows = new.transpose(0, 1).contiguous()
        return link.whole(rows, self.forward.bounds, "while gathering index keys").transpose(0, 1)


class Past:
    """Take the place of a layer's cache, and say that the tokens of earlier ranks have been seen: some layers scale
    their queries by the position that they compute from it (Llama 4)."""

    def __init__(self, start: int) -> None:
        self.start = start

    def get_seq_length(self, layer: int = 0) -> int:
        return self.start

    def update(self, key: Tensor, value: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return key, value
