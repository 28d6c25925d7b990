"""Read what a layer of a transformers model sees from its other arguments, where its mask does not tell.

Some callers drop the mask, such as DeepSpeed's Ulysses and accelerate's context parallelism. Others describe packed
samples by `cu_seq_lens_q`, as flash-attention's interface takes them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilated_attention import UnsupportedError
from dilated_attention.integrations.own_attention import Shown
from dilated_attention.plumbing import require_true

WINDOWED = {"sliding_attention", "chunked_attention"}

WITHOUT_SDPA: set[type] = set()
"""The configurations of the models made so far that have no "sdpa"."""

WITH_CONVOLUTIONS: set[type] = set()
"""The configurations of the models made so far that have convolutions along the sequence. These may carry what a row of
padding holds into its neighbours."""


def note(model: PreTrainedModel) -> None:
    """Note what a model that has been made tells about others of its configuration."""
    if not model._supports_sdpa:
        WITHOUT_SDPA.add(type(model.config))
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        WITH_CONVOLUTIONS.add(type(model.config))


def remedy(config: Any) -> str:
    """Return advice: the implementation with which to load a model, "eager" if it has no "sdpa"."""
    other = "eager" if type(config) in WITHOUT_SDPA else "sdpa"
    return f'load the model with attn_implementation="{other}"'


def windows(config: Any) -> list[str]:
    """Name the windows and chunks that a configuration asks for."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return sorted(WINDOWED & set(kinds))
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        return [f"sliding_window={window}"]
    return []


def has_window(layer: nn.Module) -> bool:
    """Return whether a layer's configuration says that it has a window or chunks."""
    config = getattr(layer, "config", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return bool(windows(config))
    place = getattr(layer, "layer_idx", None)
    return place is not None and kinds[place] in WINDOWED


def without_mask(module: nn.Module, q: Tensor, keys: int, is_causal: bool | None, arguments: dict[str, Any]) -> Shown:
    """Return what a layer shows whose mask is None: every key, or every earlier key of a causal layer, within the
    window in its arguments.

    q: `(batch, queries, heads, head_dim)`. keys: their number. is_causal: None: `module.is_causal`. Raises
    UnsupportedError if the arguments show that the mask said more.
    """
    name, queries = type(module).__name__, q.shape[1]
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if not isinstance(causal, bool):
        raise UnsupportedError(f"{name} gives neither a mask nor is_causal; causality is unknown")
    window = arguments.get("sliding_window")
    if causal and not window and has_window(module):
        raise UnsupportedError(
            f"{name} got neither its mask nor sliding_window, and its configuration has {windows(module.config)[0]}: "
            "give it the mask that the model makes"
        )
    places = arguments.get("position_ids")
    if isinstance(places, Tensor) and places.ndim == 2 and (causal or queries == keys):
        _require_whole(places, keys, arguments.get("cu_seq_lens_q") is not None)
    sees_later = not causal or queries == 1
    if window and sees_later:  # as in flash-attention's interface: fewer than `window` tokens on each side
        window -= 1
    return Shown(not sees_later, window, q_start=keys - queries, queries=queries, keys=keys)


def _require_whole(places: Tensor, keys: int, are_packed: bool) -> None:
    """Raise UnsupportedError unless positions, `(batch, queries)`, count on by 1 to the last of `keys` keys."""
    first = places[:, 0]
    past = keys - places.shape[1]
    require_true(
        (first >= past).all() if past else (first == 0).all(),
        "position_ids do not begin at 0, the mask is None and there is no cache, as in a shard of a sequence, where "
        'earlier keys are missing: gather the sequence before the attention, or use attn_implementation="sdpa"',
    )
    if not are_packed:
        require_true(
            (places.diff(dim=1) == 1).all(),
            "position_ids restart or jump, and the mask is None, so that packed samples or padding would be lost: "
            "give cu_seq_lens_q, or the mask that the model makes",
        )


def with_samples(shown: Shown, batch: int, arguments: dict[str, Any]) -> Shown:
    """Return what a mask shows, with the packed samples that `cu_seq_lens_q` bounds in all rows one after another.

    Raises UnsupportedError unless it agrees with `cu_seq_lens_k`, with positions that restart, and with `seq_idx`.
    """
    bounds, numbers, places = (arguments.get(name) for name in ("cu_seq_lens_q", "seq_idx", "position_ids"))
    if bounds is not None:
        samples = _numbered(shown, batch, bounds, arguments.get("cu_seq_lens_k"))
        agree = None
        if shown.samples is not None:
            agree = _edges(samples) == _edges(shown.samples)
        elif isinstance(places, Tensor) and places.ndim == 2:
            jumps = places.diff(dim=1) != 1
            agree = (_edges(samples) == jumps) | ~jumps.any()
        if agree is not None:
            require_true(
                agree.all(), "cu_seq_lens_q must begin a sample wherever position_ids restart, and nowhere else"
            )
        if shown.samples is None:
            shown = replace(shown, samples=samples)
    if numbers is not None and numbers.shape[1] == shown.queries:
        samples = torch.zeros_like(numbers) if shown.samples is None else shown.samples
        require_true(
            (_edges(numbers) == _edges(samples)).all(),
            "seq_idx must change wherever the packed samples do, and nowhere else: give position_ids that restart with "
            "each sample, and use_cache=False",
        )
    return shown


def _edges(numbers: Tensor) -> Tensor:
    """Return where the number of a token, `(batch, seq)`, differs from the one before it: bool, `(batch, seq - 1)`."""
    return numbers.diff(dim=1) != 0


def _numbered(shown: Shown, batch: int, bounds: Tensor, key_bounds: Tensor | None) -> Tensor:
    """Return the number of each token's sample, `(batch, queries)`. bounds: where samples begin, and the last ends."""
    count = batch * shown.queries
    if shown.queries != shown.keys or shown.hidden is not None or shown.blocks is not None:
        raise UnsupportedError(
            f"cu_seq_lens_q with padding, images or a cache ({shown.queries} queries, {shown.keys} keys): leave out "
            "attention_mask, and pass use_cache=False"
        )
    if shown.chunk is not None and shown.samples is None:
        raise UnsupportedError("cu_seq_lens_q with chunks: give position_ids that restart with each sample too")
    place = torch.arange(count + 1, device=bounds.device)
    right = (bounds.diff() >= 0).all() & (bounds[-1] == count)
    right = right & torch.isin(place[:: shown.queries], bounds).all()  # a sample lies in one row
    if key_bounds is not None:
        right = right & (key_bounds == bounds).all()
    require_true(
        right, f"cu_seq_lens_q must rise from 0 to the {count} tokens of the batch, with each row's first token"
    )
    return torch.bucketize(place[:-1], bounds, right=True).view(batch, shown.queries)
