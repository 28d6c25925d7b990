"""Run a transformers model over the ranks of a mesh, each of which holds a contiguous shard of the sequence.

    set_context_parallel(model, mesh)
    loss = model(**shard_batch(batch, mesh)).loss  # the global mean, on every rank

A layer sees what it sees on one device: its window, its chunks, packed samples, padding. No mask over pairs is formed,
and only the rows that a layer needs travel (`attention(..., mesh=)`). Everything else in the model must compute a token
from this token and its position alone. `probed` tests that with a few tokens before anything is changed.

A hook of the outermost model begins each forward: the ranks compare their inputs, and what depends on other shards
(where packed samples begin, which tokens are padding, the length) is gathered once for all layers, as a `Forward`. The
mask function puts it into the layers' `Shown`, and so it reaches a layer that is recomputed in the backward as well.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from transformers import PreTrainedModel, masking_utils

from dilated_attention import Dilated, UnsupportedError, attention
from dilated_attention.integrations.chosen_keys import attend_chosen, that_are_shown
from dilated_attention.integrations.locality import ACTIVE, accepts, probed
from dilated_attention.integrations.locality import active as active
from dilated_attention.integrations.own_attention import Chosen, Shown, pattern_of_shown
from dilated_attention.integrations.positions import position_table
from dilated_attention.integrations.sharded_batches import NOT_SHIFTED, SHIFTED, GlobalLoss
from dilated_attention.plumbing import Link, Mesh, balanced_bounds, checks, context_group, fetched, held_mesh, link_of

NAME = "dilated_attention"

_OVER = "_over_ranks"
"""The attribute in which a model holds its `OverRanks`."""

_LAYER = "_layer_over_ranks"
"""The attribute in which an attention layer of such a model holds its name."""

_REFUSED_ARGUMENTS = {
    "past_key_values": "a cache holds one rank's keys; call the model on whole sequences with use_cache=False",
    "cache": "a cache holds one rank's keys; call the model on whole sequences with use_cache=False",
    "pixel_values": "images are not sharded; embed them before, and give inputs_embeds",
    "input_features": "sound is not sharded; embed it before, and give inputs_embeds",
    "output_router_logits": "the balance loss of experts is a mean over all tokens; leave it out",
    "cu_seq_lens_q": "give position_ids that restart with each sample; shard_batch makes them",
    "seq_idx": "give position_ids that restart with each sample; shard_batch makes them",
    "encoder_hidden_states": "cross-attention is not supported over a mesh",
}


def layer_name(module: nn.Module) -> str | None:
    """Return the name of an attention layer of a model over a mesh; None: it is of another model."""
    return module.__dict__.get(_LAYER)


@dataclass(frozen=True, eq=False)
class Keys:
    """Hold keys and values `(batch, rows, kv_heads, head_dim)` of a layer; `first` is the position of the first."""

    k: Tensor
    v: Tensor
    first: int

    @classmethod
    def none(cls, k: Tensor, v: Tensor, first: int) -> Keys:
        """Return no rows, of the shapes of k and v."""
        return cls(k[:, :0], v[:, :0], first)

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
        left_sums: whether a forward returned the losses of this rank's tokens, for the caller to add up.
        kept: where a forward leaves the keys of this rank that later tokens see, by layer; None: nowhere.
    """

    mesh: DeviceMesh
    transport: str
    seq_len: int | None
    finds_packed: bool
    is_dilated: bool
    chooses: bool
    left_sums: bool = False
    kept: dict[nn.Module, Keys] | None = None

    @property
    def link(self) -> Link:
        return link_of(context_group(self.mesh))


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
        return replace(shown, q_start=self.start, k_start=self.start, ranks=self)

    def attend(
        self, shown: Shown, q: Tensor, k: Tensor, v: Tensor, layer: nn.Module, *, indices: Tensor | None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """Return what `own_attention.attend` does on one device, for this rank's shard of q, k and v.

        indices: the keys that each query of this shard lists, as in `chosen_keys.as_listed`; None: no lists.
        """
        if shown.blocks is not None:
            self._refuse("a block of tokens that see one another (a prefix, an image) over a mesh", q)
        if indices is not None and indices.shape[2] < self.seq_len:
            return self._attend_listed(shown, indices, q, k, v, layer, options)
        if self.over.kept is not None:
            self.over.kept[layer] = self._seen_later(shown, k, v)
        options |= self._options(layer) | {"is_causal": shown.is_causal}
        whole = replace(shown, q_start=0, k_start=0, queries=self.seq_len, keys=self.seq_len)
        hidden = None
        if self.hidden is not None and not (shown.is_causal and self.ends_with_padding):
            hidden = self.hidden[:, self.start : self.stop]

        edges = self._edges(shown)
        if edges is None:
            pattern, _ = pattern_of_shown(whole, 0, self.seq_len)
            return _out(attention(q, k, v, pattern, key_padding_mask=hidden, **options))
        if self.samples is not None:  # chunks begin at edges
            whole = replace(whole, chunk=None)
        pattern, _ = pattern_of_shown(whole, 0, self.seq_len)
        parts = []
        for i, of_row in enumerate(edges):
            row = slice(i, i + 1)
            mask = None if hidden is None else hidden[row]
            bounds = torch.tensor(of_row)
            part = attention(q[row], k[row], v[row], pattern, cu_seqlens=bounds, key_padding_mask=mask, **options)
            parts.append(_out(part))
        return torch.cat(parts)

    def _attend_listed(
        self, shown: Shown, indices: Tensor, q: Tensor, k: Tensor, v: Tensor, layer: nn.Module, options: dict[str, Any]
    ) -> Tensor:
        """Return the attention of this rank's queries over the keys that they list, `(batch, shard, k)`. Only the keys
        that some query of this rank lists travel."""
        lists = that_are_shown(self._over_all_keys(shown), indices)
        is_listed = torch.zeros(self.seq_len, dtype=torch.bool, device=q.device)
        is_listed[self.start] = True  # every rank takes part in the backward
        is_listed[lists[lists >= 0].long()] = True
        number = is_listed.cumsum(0) - 1  # of a key among those that are listed

        widths = [k.shape[3], v.shape[3]]
        tokens = is_listed.nonzero()[:, 0]
        rows = fetched(torch.cat([k, v], 3), tokens, self.bounds, self.over.mesh, layer_name(layer) or "")
        k, v = rows.split(widths, 3)
        lists = number[lists.long()].masked_fill(lists < 0, -1)
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
        return _out(attention(q, k, v, pattern, **options))

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

    def _refuse(self, problem: str, q: Tensor) -> None:
        self.over.link.refuse(f"{problem} is not supported: leave the mesh out", q.device)


def _out(found: Any) -> Tensor:
    assert isinstance(found, Tensor)
    return found


def set_over_ranks(
    model: PreTrainedModel, mesh: Mesh | None, transport: str = "auto", layer: str = "", seq_len: int | None = None
) -> None:
    """Run a transformers model over `mesh`; None: back to one device. `parallel.set_context_parallel` calls this.

    Raises UnsupportedError for a model whose other layers look along the sequence, before anything travels.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if mesh is None:
        for module in model.modules():
            module.__dict__.pop(_LAYER, None)
        for part in parts:
            part.__dict__.pop(_OVER, None)
            if isinstance(part.__dict__.get("_loss_function"), GlobalLoss):
                del part.__dict__["_loss_function"]
        return
    held = held_mesh(mesh)
    assert held is not None
    present = model.__dict__.get(_OVER)
    if seq_len is not None:
        seq_len = checks.positive("seq_len", seq_len)
    if (
        layer
        and present is not None
        and (present.mesh, present.transport, present.seq_len) == (held, transport, seq_len)
    ):
        return  # a part of a model that has it already
    found = probed(model)
    is_dilated = any(getattr(part.config, NAME, None) is not None for part in parts)
    over = OverRanks(held, transport, seq_len, found.finds_packed, is_dilated, bool(found.indexers))
    for module, name in found.layers.items():
        module.__dict__[_LAYER] = name
        if "get_seq_length" in inspect.getsource(type(module).forward):
            _hook(module, _give_past)
    for module in found.indexers:
        module.__dict__[_LAYER] = found.names[module]
    for module in model.modules():
        if "Rotary" in type(module).__name__:
            _hook(module, _extend)
            if _cut not in module._forward_hooks.values():
                module.register_forward_hook(_cut)
    for part in parts:
        part.__dict__[_OVER] = over
        _hook(part, _enter)
        if _leave not in part._forward_hooks.values():
            part.register_forward_hook(_leave, with_kwargs=True, always_call=True)
        kind = getattr(part, "loss_type", None)
        if kind in SHIFTED | NOT_SHIFTED and "_loss_function" not in part.__dict__:
            part.__dict__["_loss_function"] = GlobalLoss(held, kind in SHIFTED)


def ranks_of(model: nn.Module) -> OverRanks | None:
    """Return how a model runs over ranks; None: it has no mesh."""
    for module in model.modules():
        over = module.__dict__.get(_OVER)
        if over is not None:
            return over
    return None


def _hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    if hook not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(hook, with_kwargs=True)


def _enter(model: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """Begin the forward of the outermost model: compare the ranks' inputs, and complete them."""
    over = model.__dict__.get(_OVER)
    if over is None or ACTIVE.get() is not None:
        return None
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            f"torch.compile of {type(model).__name__} over a mesh is not supported: compile its layers instead"
        )
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    given = dict(zip(names, args, strict=False)) | given
    forward, given = _begun(model, over, given)
    ACTIVE.set(forward)
    return (), given


def _leave(model: nn.Module, args: Any, given: Any, output: Any) -> None:
    forward = ACTIVE.get()
    if not isinstance(forward, Forward) or forward.model is not model:
        return
    ACTIVE.set(None)
    error = sys.exc_info()[1]
    if error is not None:  # it may be this rank's alone
        forward.over.link.leave(str(error))
    elif given.get("fused_lm_head"):  # of TRL
        forward.over.left_sums = True
    elif output is not None and forward.wants_loss and not forward.made_loss:
        raise UnsupportedError(
            f"{type(model).__name__} computes its loss itself, over this rank's shard alone: leave labels out, and "
            "give cp_mean the sum of the losses and their number"
        )


def _begun(model: nn.Module, over: OverRanks, given: dict[str, Any]) -> tuple[Forward, dict[str, Any]]:
    """Return the forward of a model with these arguments, and the arguments completed.

    Every rank raises a ValueError if the arguments of one rank are refused, differ, or make no sequence.
    """
    given = dict(given)
    link = over.link
    problem, inputs = _checked(model, over, given)
    mask = given.get("attention_mask")
    positions = given.get("position_ids")
    wants_loss = given.get("labels") is not None or given.get("shift_labels") is not None
    text = {
        "function": type(model).__name__,
        "batch": None if inputs is None else inputs.shape[0],
        "attention_mask": mask is not None,
        "labels": wants_loss,
        "num_items_in_batch": given.get("num_items_in_batch") is not None,
        "training": model.training,
    }
    link.place = f"{type(model).__name__}.forward"
    device = torch.device("cpu") if inputs is None else inputs.device
    link.compare("\n".join([f"{key}={value}" for key, value in text.items()]), problem, device)
    assert inputs is not None
    assert positions is not None

    hidden = None if mask is None else ~mask.bool()
    counted = _counted(positions, inputs.shape[0])
    facts = _Facts.gathered(link, inputs.shape[1], hidden, positions, counted)
    bounds = _bounds(model, over, facts.shards)
    forward = Forward(model, over, bounds, wants_loss=wants_loss)
    forward.last_position = facts.last_position
    _require_table(model, facts.last_position)
    if facts.is_padded:
        assert hidden is not None
        forward.hidden = link.whole(hidden.T.contiguous(), bounds, "while gathering attention_mask").T
    if counted is not None and mask is None and over.finds_packed and facts.restarts:
        places = link.whole(counted.T.contiguous(), bounds, "while gathering position_ids").T.cpu()
        forward.places = places
        forward.samples = [[0, *_restarts(row), forward.seq_len] for row in places]
    if over.is_dilated:
        _require_dilatable(forward)

    if given.get("labels") is None and wants_loss:
        given["labels"] = given["shift_labels"]  # models compute a loss only if they have labels
    if accepts(model, "use_cache"):
        given["use_cache"] = False
    return forward, given


@dataclass(frozen=True)
class _Facts:
    """Hold what the ranks tell one another before each forward.

    Attributes:
        shards: the number of tokens of each rank.
        last_position: the greatest of all position_ids.
        is_padded: whether `attention_mask` hides a token of some rank.
        restarts: whether positions do not count on by 1, in a shard or from one to the next.
    """

    shards: list[int]
    last_position: int
    is_padded: bool
    restarts: bool

    @classmethod
    def gathered(
        cls, link: Link, shard: int, hidden: Tensor | None, positions: Tensor, counted: Tensor | None
    ) -> _Facts:
        """Return the facts of all ranks. shard: the tokens of this rank; the other arguments are its own, too."""
        batch = 0 if counted is None else counted.shape[0]
        own = torch.zeros(1, 4 + 2 * batch, dtype=torch.int64, device=positions.device)
        own[0, 0] = shard
        if positions.numel():
            own[0, 1] = positions.max()
        if hidden is not None:
            own[0, 2] = hidden.any()
        if counted is not None and shard:
            own[0, 3] = (counted.diff(dim=1) != 1).any()
            own[0, 4 : 4 + batch] = counted[:, 0]
            own[0, 4 + batch :] = counted[:, -1]
        link.enter(link.place)
        every = link.whole(own, range(link.size + 1), "while gathering the lengths of shards").cpu()
        first = every[1:, 4 : 4 + batch]
        last = every[:-1, 4 + batch :]
        restarts = bool(every[:, 3].any()) or bool((first != last + 1).any())
        return cls(every[:, 0].tolist(), int(every[:, 1].max()), bool(every[:, 2].any()), restarts)


def _bounds(model: nn.Module, over: OverRanks, shards: list[int]) -> tuple[int, ...]:
    """Return the edges of the ranks' shards. Raises ValueError unless they are those of `sequence_range`."""
    name = type(model).__name__
    total = sum(shards)
    bounds = balanced_bounds(total, len(shards))
    if shards != [stop - start for start, stop in pairwise(bounds)]:
        raise ValueError(
            f"{name} over a mesh: the ranks hold {shards} tokens, which are not the shards of {total}; cut the batch "
            "by shard_batch(batch, mesh)"
        )
    if over.seq_len not in (None, total):
        raise ValueError(f"{name} over a mesh: {total} tokens, and set_context_parallel got seq_len={over.seq_len}")
    if total < len(shards):
        raise ValueError(f"{name} over a mesh: {total} tokens are fewer than the {len(shards)} ranks")
    return bounds


def _restarts(places: Tensor) -> list[int]:
    """Return where the positions of a row, `(seq,)`, do not count on by 1."""
    return ((places.diff() != 1).nonzero()[:, 0] + 1).tolist()


def _require_dilatable(forward: Forward) -> None:
    """Raise ValueError for batches that a dilated pattern over ranks does not take."""
    name = type(forward.model).__name__
    if forward.samples is not None:
        raise ValueError(f"{name} over a mesh: packed samples in a dilated model; pad them, give attention_mask")
    if not forward.ends_with_padding:
        raise ValueError(
            f"{name} over a mesh: attention_mask hides tokens before others, and a dilated pattern counts the tokens "
            "that it keeps: pad on the right"
        )


def _checked(model: nn.Module, over: OverRanks, given: Mapping[str, Any]) -> tuple[str | None, Tensor | None]:
    """Return why this rank's arguments are refused, if they are, and its tokens or embeddings."""
    inputs = given.get("input_ids")
    if inputs is None:
        inputs = given.get("inputs_embeds")
    if not isinstance(inputs, Tensor) or inputs.ndim < 2:
        return "give input_ids or inputs_embeds, (batch, shard, ...)", None
    for name, remedy in _REFUSED_ARGUMENTS.items():
        value = given.get(name)
        if value is not None and value is not False:
            return f"{name} over a mesh is not supported: {remedy}", inputs
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):
        return f"config.output_router_logits over a mesh: {_REFUSED_ARGUMENTS['output_router_logits']}", inputs
    if given.get("use_cache"):
        return f"use_cache=True over a mesh is not supported: {_REFUSED_ARGUMENTS['cache']}", inputs
    mask = given.get("attention_mask")
    if mask is not None and tuple(mask.shape) != tuple(inputs.shape[:2]):
        return f"attention_mask must be this rank's, {tuple(inputs.shape[:2])}; got {tuple(mask.shape)}", inputs
    positions = given.get("position_ids")
    if positions is None:
        return "position_ids are missing, which tell a shard from a whole text: use shard_batch(batch, mesh)", inputs
    if positions.shape[-1] != inputs.shape[1]:
        return (
            f"position_ids must be those of this rank's {inputs.shape[1]} tokens; got {tuple(positions.shape)}",
            inputs,
        )
    kind = getattr(model, "loss_type", None)
    if given.get("labels") is not None and given.get("shift_labels") is None and kind in SHIFTED:
        return "labels without shift_labels: the label of the last token is on the next rank; use shard_batch", inputs
    if given.get("shift_labels") is not None and kind in NOT_SHIFTED:
        return f"shift_labels for {type(model).__name__}, which does not shift: shard_batch(..., shift=False)", inputs
    return None, inputs


def _counted(positions: Tensor, batch: int) -> Tensor | None:
    """Return the positions from which transformers finds packed samples, `(batch, shard)`; None: there are none."""
    if positions.ndim == 3:  # rotary positions of several axes, after those of the text
        if positions.shape[0] != 4:
            return None
        positions = positions[0]
    return positions.long().expand(batch, -1)


def _require_table(model: nn.Module, last: int) -> None:
    for module in model.modules():
        table = position_table(module)
        if table is not None and last >= table.num_embeddings:
            raise ValueError(
                f"position {last}, but {type(module).__name__} has {table.num_embeddings} learned positions: lengthen "
                "the table with extend_positions(model, length)"
            )


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


class _Past:
    """Take the place of a layer's cache, and say that the tokens of earlier ranks have been seen: some layers scale
    their queries by the position that they compute from it (Llama 4)."""

    def __init__(self, start: int) -> None:
        self.start = start

    def get_seq_length(self, layer: int = 0) -> int:
        return self.start

    def update(self, key: Tensor, value: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return key, value


def _give_past(layer: nn.Module, args: Any, given: dict[str, Any]) -> Any:
    """Give a `_Past` to a layer that asks a cache for the number of tokens."""
    shown = given.get("attention_mask")
    ranks = getattr(shown, "ranks", None) if isinstance(shown, Shown) else None
    if ranks is None:
        return None
    for name in ("past_key_values", "cache"):  # its name from transformers 5.24 on is the second
        if name in inspect.signature(layer.forward).parameters:
            return args, {**given, name: _Past(ranks.start)}
    return None


def _extend(rotary: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """Add the last position of all ranks to those of this rank: some rotations are scaled by the greatest of them."""
    forward = ACTIVE.get()
    if not isinstance(forward, Forward) or not hasattr(rotary, "rope_type"):
        return None
    is_named = "position_ids" in given
    if not is_named and len(args) < 2:
        return None
    places = given["position_ids"] if is_named else args[1]
    places = F.pad(places, (0, 1), value=forward.last_position)
    if is_named:
        return args, {**given, "position_ids": places}
    return (args[0], places, *args[2:]), given


def _cut(rotary: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Take the rotation of the position that `_extend` added out again."""
    if not isinstance(ACTIVE.get(), Forward) or not hasattr(rotary, "rope_type"):
        return None
    return tuple(x[..., :-1, :] for x in output) if isinstance(output, tuple) else output[..., :-1, :]
