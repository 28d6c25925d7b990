"""Run a transformers model over the ranks of a mesh, each of which holds a contiguous shard of the sequence.

    set_context_parallel(model, mesh)
    loss = model(**shard_batch(batch, mesh)).loss  # the global mean, on every rank

A layer sees what it sees on one device: its window, its chunks, packed samples, padding. No mask over pairs is formed,
and only the rows that a layer needs travel (`attention(..., mesh=)`). Everything else in the model must compute a token
from this token and its position alone. `probed` tests that with a few tokens before anything is changed.

A hook of the outermost model begins each forward: the ranks compare their inputs, and what depends on other shards
(where packed samples begin, which tokens are padding, the length) is gathered once for all layers, as a `Forward`
(`forward_over_ranks`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilated_attention import UnsupportedError
from dilated_attention.integrations.chosen_keys import hook
from dilated_attention.integrations.forward_over_ranks import LAYER, Forward, OverRanks, Past
from dilated_attention.integrations.forward_over_ranks import layer_name as layer_name
from dilated_attention.integrations.locality import ACTIVE, TOKEN_TYPES, accepts, probed
from dilated_attention.integrations.locality import active as active
from dilated_attention.integrations.own_attention import NAME, Shown
from dilated_attention.integrations.positions import position_table
from dilated_attention.integrations.sharded_batches import NOT_SHIFTED, SHIFTED, GlobalLoss
from dilated_attention.plumbing import Link, Mesh, balanced_bounds, checks, held_mesh

_OVER = "_over_ranks"
"""The attribute in which a model holds its `OverRanks`."""

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


_TAKE_IMAGES = {"aya_vision", "gemma3", "internvl", "llava", "mistral3", "paligemma"}
"""Types of models that put the embeddings of all images, in their order, in the places of image tokens, and do nothing
else with them (`_with_own_images`)."""


def set_over_ranks(
    model: PreTrainedModel, mesh: Mesh | None, transport: str = "auto", layer: str = "", seq_len: int | None = None
) -> None:
    """Run a transformers model over `mesh`; None: back to one device. `parallel.set_context_parallel` calls this.

    Raises UnsupportedError for a model whose other layers look along the sequence, before anything travels.
    """
    if mesh is None:
        _forget(model)
        return
    held = held_mesh(mesh)
    assert held is not None
    if seq_len is not None:
        seq_len = checks.positive("seq_len", seq_len)
    present = model.__dict__.get(_OVER)
    if layer and present is not None and present.is_of(held, transport, seq_len):
        return  # a part of a model that has it already

    found = probed(model)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    is_dilated = any(getattr(part.config, NAME, None) is not None for part in parts)
    over = OverRanks(
        held, transport, seq_len, found.finds_packed, is_dilated, bool(found.indexers), found.runs_are_blocks,
        model.config.model_type in _TAKE_IMAGES and hasattr(model, "get_image_features"),
    )  # fmt: skip
    for module, name in found.layers.items():
        module.__dict__[LAYER] = name
        if "get_seq_length" in inspect.getsource(type(module).forward):
            hook(module, _give_past)
    for module in found.indexers:
        module.__dict__[LAYER] = found.names[module]
    for module in model.modules():
        if "Rotary" in type(module).__name__:
            hook(module, _extend, _cut)
    for part in parts:
        part.__dict__[_OVER] = over
        if not any(module in found.layers for module in part.modules()):
            continue  # an encoder of images: each rank runs it on all of them
        hook(part, _enter, _leave, with_kwargs=True, always_call=True)
        kind = getattr(part, "loss_type", None)
        if kind in SHIFTED | NOT_SHIFTED and "_loss_function" not in part.__dict__:
            part.__dict__["_loss_function"] = GlobalLoss(held, kind in SHIFTED)


def _forget(model: nn.Module) -> None:
    """Remove what `set_over_ranks` wrote into a model, but for its hooks, which then do nothing."""
    for module in model.modules():
        held = module.__dict__
        held.pop(LAYER, None)
        held.pop(_OVER, None)
        if isinstance(held.get("_loss_function"), GlobalLoss):
            del held["_loss_function"]


def ranks_of(model: nn.Module) -> OverRanks | None:
    """Return how a model runs over ranks; None: it has no mesh."""
    for module in model.modules():
        over = module.__dict__.get(_OVER)
        if over is not None:
            return over
    return None


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
    if output is None:  # the forward has failed, perhaps on this rank alone
        forward.over.link.leave(str(sys.exc_info()[1]))
    elif given.get("fused_lm_head"):  # of TRL
        forward.over.left_sums = True
    elif forward.wants_loss and not forward.made_loss:
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
    inputs = given.get("input_ids")
    if inputs is None:
        inputs = given.get("inputs_embeds")
    problem = _problem(model, over, inputs, given)
    mask = given.get("attention_mask")
    positions = given.get("position_ids")
    wants_loss = given.get("labels") is not None or given.get("shift_labels") is not None
    text = {
        "function": type(model).__name__,
        "batch": inputs.shape[0] if isinstance(inputs, Tensor) and inputs.ndim else None,
        "attention_mask": mask is not None,
        "labels": wants_loss,
        "num_items_in_batch": given.get("num_items_in_batch") is not None,
        "token_types": sorted(name for name in TOKEN_TYPES if given.get(name) is not None),
        "training": model.training,
    }
    link.place = f"{type(model).__name__}.forward"
    device = inputs.device if isinstance(inputs, Tensor) else torch.device("cpu")
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
    if given.get("pixel_values") is not None:
        given = _with_own_images(model, forward, given)
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


def _problem(model: nn.Module, over: OverRanks, inputs: Any, given: Mapping[str, Any]) -> str | None:
    """Return why this rank's arguments are refused; None: they are not. inputs: its tokens or embeddings."""
    if not isinstance(inputs, Tensor) or inputs.ndim < 2:
        return "give input_ids or inputs_embeds, (batch, shard, ...)"
    for name, remedy in _REFUSED_ARGUMENTS.items():
        value = given.get(name)
        if value is None or value is False:
            continue
        if name != "pixel_values" or not over.takes_images or given.get("input_ids") is None:
            return f"{name} over a mesh is not supported: {remedy}"
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        return f"config.output_router_logits over a mesh: {_REFUSED_ARGUMENTS['output_router_logits']}"
    if given.get("use_cache"):
        return f"use_cache=True over a mesh is not supported: {_REFUSED_ARGUMENTS['cache']}"

    mask = given.get("attention_mask")
    shape = tuple(inputs.shape[:2])
    if mask is not None and tuple(mask.shape) != shape:
        return f"attention_mask must be this rank's, {shape}; got {tuple(mask.shape)}"
    positions = given.get("position_ids")
    if positions is None:
        return "position_ids are missing, which tell a shard from a whole text: use shard_batch(batch, mesh)"
    if positions.shape[-1] != inputs.shape[1]:
        return f"position_ids must be those of this rank's {inputs.shape[1]} tokens; got {tuple(positions.shape)}"

    kind = getattr(model, "loss_type", None)
    shifted = given.get("shift_labels")
    if given.get("labels") is not None and shifted is None and kind in SHIFTED:
        return "labels without shift_labels: the label of the last token is on the next rank; use shard_batch"
    if shifted is not None and kind in NOT_SHIFTED:
        return f"shift_labels for {type(model).__name__}, which does not shift: shard_batch(..., shift=False)"
    return None


def _with_own_images(model: Any, forward: Forward, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward with the embeddings of this rank's image tokens in place of the images, which
    each rank embeds by the model's own code."""
    link = forward.over.link
    own = given["input_ids"] == model.config.image_token_id
    link.enter("image tokens")
    every = link.whole(own.T.contiguous(), forward.bounds, "while gathering image tokens").T
    try:
        names = inspect.signature(model.get_image_features).parameters
        features = model.get_image_features(**{name: given[name] for name in names if name in given}, return_dict=True)
    except BaseException as error:
        link.leave(str(error))
        raise
    rows = features.pooler_output
    is_list = isinstance(rows, (list, tuple))
    rows = torch.cat(list(rows)) if is_list else rows.flatten(0, 1)
    if int(every.sum()) != len(rows):
        raise ValueError(
            f"{type(model).__name__} over a mesh: the ranks hold {int(every.sum())} image tokens, and pixel_values "
            f"give {len(rows)}: pass the images of the whole batch on every rank"
        )
    number = every.flatten().cumsum(0).view(every.shape) - 1  # the images' rows go to image tokens, text by text
    rows = rows[number[:, forward.start : forward.stop][own]]
    features.pooler_output = [rows] if is_list else rows[None]
    del given["pixel_values"]
    return {**given, "mm_encoder_outputs": {"image": features}}


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


def _give_past(layer: nn.Module, args: Any, given: dict[str, Any]) -> Any:
    """Give a `Past` to a layer that asks a cache for the number of tokens."""
    shown = given.get("attention_mask")
    if not isinstance(shown, Shown) or shown.ranks is None:
        return None
    for name in ("past_key_values", "cache"):  # its name from transformers 5.24 on is the second
        if name in inspect.signature(layer.forward).parameters:
            return args, {**given, name: Past(shown.ranks.start)}
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
