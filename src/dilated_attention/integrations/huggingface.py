"""Hugging Face transformers: `attn_implementation="dilated_attention"`.

    model = AutoModel.from_pretrained(..., attn_implementation="dilated_attention")

computes the model's own attention (with its windows, chunks, sinks and caps) and pays only for the pairs that it
shows, and

    dilate(model, segment_lengths=[2048, 8192], dilation_rates=[1, 4])

replaces it by a dilated pattern. Setting `config.dilated_attention = {"segment_lengths": ..., "dilation_rates":
...}` before the model is made does the same.

A saved configuration holds its pattern and `attn_implementation="dilated_attention"`. Importing this module makes both
known to transformers, so that the model loads dilated; where it is not imported, transformers raises a `ValueError`
that names the unknown implementation.

The segment grid counts only the tokens that `attention_mask` keeps. So a sample's tokens get the same output with
and without padding, wherever the padding lies. Padding rows get 0.

transformers asks an implementation for two functions, a mask function and an attention function. The mask function
says which keys a query may see. Ours returns no tensor over pairs but a `Shown`, and the attention function reads it. A
mask that it cannot express is refused, and so is one with windows, chunks, packed samples or blocks in a dilated layer.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from dilated_attention import Dilated, UnsupportedError
from dilated_attention.decoding import cached_attention
from dilated_attention.integrations import chosen_keys, over_ranks, relative_biases
from dilated_attention.integrations.chosen_blocks import ChosenBlocks, Selector
from dilated_attention.integrations.chosen_keys import (
    as_listed,
    attend_chosen,
    chooses_keys,
    hook,
    with_compressed,
)
from dilated_attention.integrations.generation_over_ranks import generate_over_ranks as generate_over_ranks
from dilated_attention.integrations.layer_masks import (
    WITH_CONVOLUTIONS,
    has_window,
    note,
    remedy,
    windows,
    with_samples,
    without_mask,
)
from dilated_attention.integrations.model_traffic import exchange_plan as exchange_plan
from dilated_attention.integrations.own_attention import NAME as NAME
from dilated_attention.integrations.own_attention import (
    Chosen,
    NotATensor,
    Refused,
    Shown,
    attend,
    attended,
    is_for_operator,
    permuted,
    read_arguments,
    read_mask,
    real_first,
)
from dilated_attention.integrations.pair_masks import layout_in_graph, layout_of_function, layout_of_tensor
from dilated_attention.integrations.positions import extend_positions as extend_positions
from dilated_attention.integrations.positions import position_table, require_positions, require_transformers
from dilated_attention.integrations.relative_biases import bias_of
from dilated_attention.integrations.sharded_batches import shard_batch as shard_batch
from dilated_attention.integrations.unpadding import unpad as unpad
from dilated_attention.plumbing import as_autocast, checks, require_true, table

_OPTIONS = ("segment_lengths", "dilation_rates", "offsets", "head_groups", "backend", "layers")

_WITHOUT_EFFECT = {
    "cache_position", "deterministic", "input_ids", "length", "max_length_k", "max_length_q", "num_items_in_batch",
    "offset_mapping", "output_hidden_states", "output_router_logits", "overflow_to_sample_mapping", "position_ids",
    "return_dict", "special_tokens_mask", "task_id", "task_ids", "token_type_ids", "use_cache",
}  # fmt: skip
"""Arguments that models and tokenizers pass to every attention function and that do not change the attention."""

_READ_WITH_THE_MASK = {"block_indices", "cu_seq_lens_k", "cu_seq_lens_q", "indices", "seq_idx", "sliding_window"}
"""Arguments that a layer with the model's own attention accepts: they agree with the mask, or tell what it lacks."""

_REMEDIES = {
    "output_attentions": "the probabilities are never formed; use dilated_attention.attention_weights on q and k",
    "softcap": "scores are not capped",
    "sinks": "a sink for each query is not supported; this library has one per head",
    "cu_seq_lens_q": "packed sequences are not supported; pad them and give attention_mask",
    "cache": "paged caches are not supported; generate with the dynamic cache",
    "shift_labels": "they say that the batch is a shard of a sequence: call set_context_parallel(model, mesh)",
}


class _Pattern:
    """Provide `config.dilated_attention` on every transformers configuration: a dict with the options of the pattern.

    Setting it, also by reading a file, requests dilated attention; an implementation that was requested by its name
    stays, with a warning. Before, reading it raises AttributeError. The request is `config.attn_implementation`, which
    transformers reads and then drops. This attribute stays, so that a model that is loaded and saved is still dilated.
    """

    def __get__(self, config: Any, owner: type | None = None) -> Any:
        if config is None:
            return self
        try:
            return config.__dict__[NAME]
        except KeyError:
            raise AttributeError(f"{type(config).__name__} has no {NAME}") from None

    def __set__(self, config: Any, options: Any) -> None:
        if getattr(config, "_attn_implementation", None) is None:
            config._attn_implementation = NAME
        _warn_of_unused(config)
        config.__dict__[NAME] = options
        config.__dict__["attn_implementation"] = NAME

    def __delete__(self, config: Any) -> None:
        del config.__dict__[NAME]
        config.__dict__.pop("attn_implementation", None)


def _warn_of_unused(config: Any) -> None:
    """Warn if a configuration holds a pattern and requests another implementation."""
    if config._attn_implementation != NAME:
        warnings.warn(
            f"{type(config).__name__}.{NAME} holds a pattern, but attn_implementation={config._attn_implementation!r} "
            f'does not use it: leave attn_implementation out, or call model.set_attn_implementation("{NAME}")',
            stacklevel=3,
        )


_their_implementation, _their_post_init = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.post_init


def _correct_implementation(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
    """Do what transformers' `get_correct_attn_implementation` does, but where nothing is requested, a pattern requests
    ours, also in a part of a loaded whole. If ours is found, refuse a model that cannot use it.

    See `register`. A model whose modules are not made yet is left to `_post_init`, unless `_chooses_a_class`.
    """
    if requested_attention is None and getattr(self.config, NAME, None) is not None:
        requested_attention = NAME
    if requested_attention != NAME and str(requested_attention).lower().replace("-", "_") == NAME:
        raise ValueError(f'attn_implementation={requested_attention!r} is unknown; load the model with "{NAME}"')
    found = _their_implementation(self, requested_attention, *args, **kwargs)
    if found == NAME and (self._modules or _chooses_a_class(type(self))):  # else `_post_init` sees the made modules
        _require_own_layers(self)
    return found


def _post_init(self: PreTrainedModel) -> None:
    """Do what transformers' `post_init` does after a model is made. If the model requests our implementation and cannot
    use it, refuse it (see `register`). A pattern that it does not use, such as one of a part whose whole requests
    another implementation, gives a warning."""
    _their_post_init(self)
    if self.config._attn_implementation == NAME:
        _require_own_layers(self)
    elif getattr(self.config, NAME, None) is not None:
        _warn_of_unused(self.config)


def _chooses_a_class(kind: type[PreTrainedModel]) -> bool:
    """Return whether a model picks the class of a module by the name of its attention implementation, as SAM does."""
    source = sys.modules[kind.__module__]
    return not kind._supports_attention_backend and "[config._attn_implementation]" in inspect.getsource(source)


def _require_own_layers(model: PreTrainedModel) -> None:
    """Refuse a model that cannot use our implementation, and let its forward refuse `output_attentions`."""
    _require_interface(model)
    note(model)
    chosen_keys.serve(model)
    relative_biases.serve(model)
    options = getattr(model.config, NAME, None)
    if options is not None:
        _require_dilatable(model, _keeps_windows(options))
        configs = [getattr(layer, "config", model.config) for layer in _attention_layers(model)]
        if configs and all(x is not model.config and getattr(x, NAME, None) is None for x in configs):
            raise UnsupportedError(
                f"{type(model.config).__name__}.{NAME} reaches no attention layer: these read configurations of their "
                "own, such as config.text_config; set it there, or call dilate(model) without it"
            )
    hook(model, _refuse_probabilities)


def _refuse_probabilities(model: nn.Module, _args: Any, given: dict[str, Any]) -> None:
    """Refuse `output_attentions`, which some models (GPT-2, OPT) do not pass on to their attention layers."""
    if given.get("output_attentions") and cast(PreTrainedModel, model).config._attn_implementation == NAME:
        _refuse_arguments(model, False, {"output_attentions": True})


def register() -> None:
    """Make `attn_implementation="dilated_attention"` known to transformers, together with its mask function.

    Configurations that hold a pattern (`config.dilated_attention`) then request it. A model that requests it raises
    UnsupportedError when it is made, or when its implementation is set, if it does not call transformers' attention
    interface or, with a pattern, caps its scores or has windows that the pattern's options do not keep. Importing this
    module calls this function.

    Examples:
        >>> import transformers
        >>> from dilated_attention.integrations import huggingface  # importing it registers
        >>> "dilated_attention" in transformers.AttentionInterface().valid_keys()
        True
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, visibility)
    setattr(PreTrainedConfig, NAME, _Pattern())
    PreTrainedModel.set_context_parallel = over_ranks.set_over_ranks  # type: ignore[attr-defined]
    if PreTrainedModel.get_correct_attn_implementation is _their_implementation:
        PreTrainedModel.get_correct_attn_implementation = _correct_implementation  # type: ignore[method-assign]
        PreTrainedModel.post_init = _post_init  # type: ignore[method-assign]


def dilate(
    model: PreTrainedModel,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    offsets: Any = "head",
    head_groups: bool = False,
    backend: str = "auto",
    layers: Literal["all", "full"] = "all",
) -> PreTrainedModel:
    """Change a transformers model, in place, to use dilated attention, and return it. Its weights stay the same.

    The pattern's options are kept in `model.config.dilated_attention`, which `save_pretrained` writes.

    Args:
        segment_lengths, dilation_rates, offsets, head_groups: as in `Dilated`.
        backend: as in `dilated_attention`.
        layers: `"full"` leaves layers with windows or chunks as they are, and dilates the others.

    Raises:
        ValueError: before anything is changed, for an invalid pattern or backend, for a pattern that does not fit the
            model's key-value heads, and for a model that does not call transformers' attention interface, caps its
            scores, or has windows (with `layers="full"`: in every layer).

    Examples:
        >>> from dilated_attention.integrations.huggingface import dilate
        >>> from transformers import GPT2Config, GPT2Model
        >>> config = GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=4)
        >>> model = dilate(GPT2Model(config), segment_lengths=[16, 64], dilation_rates=[1, 4])
        >>> model(torch.randint(100, (1, 80))).last_hidden_state.shape
        torch.Size([1, 80, 32])
    """
    if layers not in ("all", "full"):
        raise ValueError(f'layers must be "all" or "full"; got {layers!r}')
    require_transformers(model)
    pattern = Dilated(segment_lengths, dilation_rates, offsets, head_groups)  # type: ignore[arg-type]
    table.check_name(backend)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    for part in parts:
        _require_interface(part)
        _require_dilatable(part, layers == "full")
        _require_heads(part, pattern)
    if _all_have_windows(_attention_layers(model)):
        raise ValueError(
            f'layers="full": every attention layer of {type(model).__name__} has a window or chunks, so that no layer '
            f"would change; {_without_windows(model.config.get_text_config())}"
        )
    model.set_attn_implementation(NAME)
    for part in parts:
        part.config.dilated_attention = {
            "segment_lengths": list(pattern.segment_lengths),
            "dilation_rates": list(pattern.dilation_rates),
            "offsets": pattern.offsets if isinstance(pattern.offsets, str) else [list(row) for row in pattern.offsets],
            "head_groups": head_groups,
            "backend": backend,
            "layers": layers,
        }
    for module in model.modules():
        if position_table(module) is not None:
            hook(module, require_positions)
    return model


def sparsify(
    model: PreTrainedModel, selector: Selector | None, *, layers: Sequence[int] | None = None, first: int = 2048
) -> PreTrainedModel:
    """Make a transformers model, in place, attend to chosen blocks of a prompt in layers without windows; return it.

    The result approximates the model's own attention. After a prompt, `report(model)` says which share of each
    head's softmax the blocks hold, measured in 32 rows. Layers with windows or chunks, padded and packed batches,
    prompts in chunks and new tokens over a cache keep the model's own attention. The choice is not saved with the
    model.

        sparsify(model, partial(sampled_blocks, density=0.25, lookahead=True))

    Args:
        selector: called as selector(q, k, is_causal=..., scale=...) -> `BlockLayout`, such as
            `routing.sampled_blocks`, `topk_blocks` or `topp_blocks` with their density or mass bound by
            `functools.partial`; None: make the layers dense again.
        layers: which attention layers, counted in the order of `model.modules()`; None: all.
        first: prompts below this many tokens keep the model's own attention.

    Raises:
        ValueError: for a model that is dilated, or does not call transformers' attention interface, for a layer that it
            does not have, and if all the layers have windows or chunks.

    Examples:
        >>> from functools import partial
        >>> from dilated_attention.integrations.huggingface import sparsify
        >>> from dilated_attention.routing import sampled_blocks
        >>> from transformers import GPT2Config, GPT2Model
        >>> sizes = {"vocab_size": 100, "n_embd": 32, "n_layer": 1, "n_head": 4}
        >>> config = GPT2Config(**sizes, attn_implementation="dilated_attention")
        >>> selector = partial(sampled_blocks, density=0.5, block_size=16, lookahead=True)
        >>> model = sparsify(GPT2Model(config), selector, first=64)
        >>> model(torch.randint(100, (1, 80))).last_hidden_state.shape
        torch.Size([1, 80, 32])
    """
    require_transformers(model)
    if selector is not None and not callable(selector):
        raise ValueError(f"selector must be a function (q, k, ...) -> BlockLayout, or None; got {selector!r}")
    first = checks.integer("first", first, 0)
    for part in (x for x in model.modules() if isinstance(x, PreTrainedModel)):
        _require_interface(part)
        if getattr(part.config, NAME, None) is not None:
            raise ValueError(f"{type(part).__name__} is dilated, and sparsify takes a model with its own attention")
    found = _attention_layers(model)
    wanted = range(len(found)) if layers is None else checks.integers("layers", layers, "integers", 0)
    if any(i >= len(found) for i in wanted):
        raise ValueError(f"layers={list(wanted)}: the model has {len(found)} attention layers, counted from 0")
    if selector is not None and _all_have_windows([found[i] for i in wanted]):
        raise ValueError(
            f"layers={layers}: these attention layers of {type(model).__name__} all have windows or chunks, which "
            "sparsify leaves as they are; choose full layers, or leave the model as it is"
        )
    model.set_attn_implementation(NAME)
    for i in wanted:
        setattr(found[i], _CHOSEN, None if selector is None else ChosenBlocks(selector, first))
    return model


_CHOSEN = "_chosen_blocks"
"""The attribute in which an attention module holds its `ChosenBlocks`."""


def _attention_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose class is named ...Attention or ...MLA and that have no such module as a direct child."""

    def attends(module: nn.Module) -> bool:
        return type(module).__name__.endswith(("Attention", "MLA"))

    return [x for x in model.modules() if attends(x) and not any(map(attends, x.children()))]


def _all_have_windows(layers: list[nn.Module]) -> bool:
    """Return whether there are attention layers and their configurations say that each has a window or chunks."""
    return bool(layers) and all(map(has_window, layers))


def _calls_the_interface(part: PreTrainedModel) -> bool:
    """Return whether the source of every attention layer of a model calls transformers' attention interface.

    About 75 files of transformers do so although their classes lack the flag `_supports_attention_backend`, Wav2Vec2
    and HuBERT among them. Others, such as SAM, contain an attention that does not.
    """
    own = _attention_layers(part)
    return bool(own) and all("ALL_ATTENTION_FUNCTIONS" in _source(x) for x in own)


def _source(module: nn.Module) -> str:
    """Return the source of a module's class, or of the first base class that has one: FSDP2 makes classes without."""
    for cls in type(module).__mro__:
        if issubclass(cls, nn.Module):
            with suppress(OSError, TypeError):
                return inspect.getsource(cls)
    return ""


def _require_interface(part: PreTrainedModel) -> None:
    name = type(part).__name__
    calls = part._supports_attention_backend or _calls_the_interface(part)
    if not calls or not part._can_set_attn_implementation():
        raise UnsupportedError(
            f"{name} does not call transformers' attention interface, and would go on with its own attention; choose a "
            "model whose class has _supports_attention_backend. Longformer, LED and BigBird take "
            "dilated_attention.integrations.longformer_bigbird.replace_attention"
        )


def _require_dilatable(part: PreTrainedModel, keeps_windows: bool) -> None:
    """Refuse a model with a part of its attention that a pattern would replace: a cap of scores, keys that it chooses,
    or windows, unless the pattern's options keep these."""
    name = type(part).__name__
    cap = getattr(part.config, "attn_logit_softcapping", None)
    if cap is not None:
        raise UnsupportedError(
            f"{name} caps its scores (config.attn_logit_softcapping={cap}), and dilated attention does "
            "not: weights that were trained with a cap need a model's own attention; choose a model without one"
        )
    if chooses_keys(part.config):
        raise UnsupportedError(
            f"{name} chooses the keys of each query, which a dilated pattern would replace: use the "
            f'model\'s own attention, attn_implementation="{NAME}" without a pattern'
        )
    found = windows(part.config)
    if found and not keeps_windows:
        raise UnsupportedError(f"{name} has {' and '.join(found)}: {_without_windows(part.config)}")


def _without_windows(config: Any) -> str:
    """Return advice: how to make a model without windows that computes the same for texts shorter than the window.

    Without windows, one type of layers remains, with one entry of `rope_parameters`. Where the types have different
    entries (Gemma 3, ModernBERT), the advice is to choose another model.
    """
    conflict = "windows cannot be combined with dilated segments"
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        return f"{conflict}; make the model with config.sliding_window = None"
    rotations = getattr(config, "rope_parameters", None) or {}
    also = ""
    if any(rotations[kind] != rotations.get("full_attention") for kind in kinds & set(rotations)):
        if len(kinds) > 1:
            return (
                f"{conflict}, and the rotary positions of {' and '.join(sorted(kinds))} layers differ, so that no "
                "configuration without windows computes the same; choose a model without windows"
            )
        (kind,) = kinds
        also = f' and config.rope_parameters["full_attention"] = config.rope_parameters["{kind}"]'
    return (
        f'{conflict}; make the model with config.layer_types = ["full_attention"] * config.num_hidden_layers{also}. '
        "Compare its logits with this model's on a text shorter than the window: in some models a layer's type "
        "decides more"
    )


def _require_heads(part: PreTrainedModel, pattern: Dilated) -> None:
    """Refuse a pattern that does not fit the number of key-value heads in the configuration, if it has one."""
    heads = getattr(part.config, "num_key_value_heads", None) or getattr(part.config, "num_attention_heads", None)
    if isinstance(heads, int):
        try:
            pattern.offset_table(heads)
        except ValueError as error:
            raise type(error)(f"{type(part).__name__}: {error}") from error


def _require_all_heads(module: nn.Module, heads: int, pattern: Dilated) -> None:
    """Refuse a part of a layer's heads where they are dilated by their number: it is unknown which heads they are."""
    every = getattr(module.config, "num_attention_heads", None)
    counted = pattern.head_groups or max(pattern.dilation_rates) > 1
    if isinstance(every, int) and heads < every and counted:
        raise UnsupportedError(
            f"{type(module).__name__} got {heads} of config.num_attention_heads={every} heads, as in Ulysses or tensor "
            "parallelism, and the pattern's offsets count them all: give each rank all heads, or use "
            "dilation_rates of 1 without head_groups"
        )


def pattern_of(config: Any) -> tuple[Dilated, str]:
    """Return the pattern and the backend that a model's configuration requests.

    Examples:
        >>> from dilated_attention.integrations.huggingface import dilate, pattern_of
        >>> from transformers import GPT2Config, GPT2Model
        >>> config = GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=4)
        >>> model = dilate(GPT2Model(config), segment_lengths=[16, 64], dilation_rates=[1, 4])
        >>> pattern, backend = pattern_of(model.config)
        >>> pattern.segment_lengths, backend
        ((16, 64), 'auto')
    """
    options = getattr(config, NAME, None)
    where = f"{type(config).__name__}.{NAME}"
    if not isinstance(options, dict):
        raise ValueError(
            f"{where} must be a dict with segment_lengths and dilation_rates; got {options!r}. Set it, or call "
            "dilated_attention.integrations.huggingface.dilate(model, segment_lengths, dilation_rates)"
        )
    for word, names in (
        ("lacks", {"segment_lengths", "dilation_rates"} - set(options)),
        ("has the unknown", set(options) - set(_OPTIONS)),
    ):
        if names:
            raise ValueError(f"{where} {word} {', '.join(sorted(names))}; it may hold {', '.join(_OPTIONS)}")
    options = dict(options)
    backend, _ = options.pop("backend", "auto"), options.pop("layers", "all")
    return Dilated(**options), backend


def _keeps_windows(options: Any) -> bool:
    """Return whether the options in `config.dilated_attention` leave layers with windows as they are."""
    return isinstance(options, dict) and options.get("layers") == "full"


def visibility(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    config: Any = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Shown | Refused:
    """Describe what the queries of a forward may see. This is the mask function that transformers calls.

    It takes the arguments of transformers' `sdpa_mask`. A mask that `read_mask` cannot read is evaluated in the first
    layer that gets it: some models make masks for kinds of layers that they do not have. In a dilated model such a mask
    and a window give a `Refused`, which raises only in such a layer. Anything else that this library cannot compute
    raises an UnsupportedError here.
    """
    if isinstance(attention_mask, NotATensor):  # made before the forward: by `generate`, or by a model that holds one
        return attention_mask
    options = getattr(config, NAME, None)
    shown: Shown | Refused | None = None
    sizes = q_length, kv_length, int(q_offset), kv_offset
    traced = torch.compiler.is_compiling()
    if traced:
        shown = read_arguments(mask_function, local_size, config, attention_mask, kwargs)
        if shown is None and options is None:
            layout = layout_in_graph(batch_size, *sizes, mask_function, attention_mask, local_size, **kwargs)
            return _placed(Shown(False, pairs=lambda: layout), *sizes, None)
    # In a graph of a dilated model, what the arguments do not tell is refused below.
    if shown is None and (local_size is not None or not traced):
        try:
            shown = read_mask(mask_function)
        except UnsupportedError as error:  # for the layer that is given it
            shown = Refused(error)
    forward = over_ranks.active()
    if isinstance(shown, Shown):
        shown = _placed(shown, *sizes, attention_mask, keeps_blocks=forward is not None)
    unread = isinstance(shown, Refused) or (isinstance(shown, Shown) and shown.needs_pairs)
    if unread and options is None and forward is None:
        make = partial(layout_of_function, mask_function, batch_size, *sizes, kwargs.get("device"))
        shown = _placed(Shown(False, pairs=make), *sizes, attention_mask)
    if isinstance(shown, Shown):
        skips = type(config) not in WITH_CONVOLUTIONS
        shown = replace(shown, skips_padding=skips, device=kwargs.get("device"))
        if forward is not None:
            shown = forward.described(shown)
    if shown is not None and _is_own(options, shown):
        return shown
    pattern_of(config)
    for flag in ("is_encoder_decoder", "add_cross_attention"):
        if getattr(config, flag, False):
            raise UnsupportedError(
                f"{type(config).__name__}.{flag}: cross-attention has no common positions to dilate; "
                "only encoders and decoders alone are supported"
            )
    if local_size is not None:
        return Refused(UnsupportedError(f"a window or chunks of {local_size} tokens: {_without_windows(config)}"))
    if isinstance(q_offset, Tensor) or kv_offset or kv_length != q_offset + q_length:
        raise UnsupportedError(
            f"{kv_length} keys from position {kv_offset} on, for {q_length} queries from {q_offset} on: only self-"
            'attention with the dynamic cache, which holds all tokens, is supported: cache_implementation="dynamic"'
        )
    shape = (batch_size, kv_length)
    if attention_mask is not None and attention_mask.shape != shape:
        raise ValueError(
            f"attention_mask must be (batch, tokens in the cache and new) = {shape}; got {tuple(attention_mask.shape)}"
        )
    return _require_plain(shown)


def _is_own(options: Any, mask: Mask) -> bool:
    """Return whether a layer computes the model's own attention: it has no pattern (`options`), or a window or chunks
    that the pattern's options leave as they are."""
    if options is None:
        return True
    local = isinstance(mask, Refused) or (isinstance(mask, Shown) and bool(mask.window or mask.chunk))
    return local and _keeps_windows(options)


def _placed(
    shown: Shown, queries: int, keys: int, q_start: int, k_start: int, mask: Tensor | None, keeps_blocks: bool = False
) -> Shown:
    """Return what a mask shows, together with the positions of its queries and keys, and the keys that are padding.

    queries, keys: their number. mask: `(batch, positions)` from position 0 on, true at real tokens; None: no padding.
    keeps_blocks: keep blocks in which no query lies, since one of another rank may.
    """
    hidden = None
    blocks = shown.blocks
    if blocks is not None and not keeps_blocks and (blocks[:, q_start : q_start + queries] < 0).all():
        blocks = None  # a text without images, a new token
    if mask is not None:
        real = nn.functional.pad(mask.bool(), (0, max(0, k_start + keys - mask.shape[1])))[:, k_start : k_start + keys]
        if torch.compiler.is_compiling() or not real.all():
            hidden = ~real
    return replace(shown, blocks=blocks, q_start=q_start, k_start=k_start, queries=queries, keys=keys, hidden=hidden)


_REPORTED: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""For each attention layer, a line that says what its last forward computed."""


def report(model: nn.Module) -> str:
    """Return a line for each attention layer of a transformers model: what its last forward with this library computed.

    Raises ValueError if no layer has had such a forward yet.

    Examples:
        >>> from dilated_attention.integrations.huggingface import report
        >>> from transformers import GPT2Config, GPT2Model
        >>> sizes = {"vocab_size": 100, "n_embd": 32, "n_layer": 1, "n_head": 4}
        >>> config = GPT2Config(**sizes, attn_implementation="dilated_attention")
        >>> model = GPT2Model(config)
        >>> _ = model(torch.randint(100, (1, 80)))
        >>> report(model).startswith("h.0.attn: causal, all keys")
        True
    """
    lines = [f"{name}: {_REPORTED[module]}" for name, module in model.named_modules() if module in _REPORTED]
    if not lines:
        raise ValueError(
            f"{type(model).__name__} has not called this library yet; load it with "
            f'attn_implementation="{NAME}" and run a forward first'
        )
    return "\n".join(lines)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention. This is the attention function that transformers calls.

    Args:
        query: `(batch, heads, new, head_dim)`.
        key, value: `(batch, kv_heads, past + new, head_dim)`.
        attention_mask: what our mask function returned.
        is_causal: decides without a mask; None: `module.is_causal` does. A dilated layer's mask must agree with it.
        s_aux: what this library calls sinks.
        position_bias: `(batch or 1, heads or 1, new or 1, past + new)`, added to scores, or less (`relative_biases`).
        kwargs: other arguments of the model, refused if they would change the attention.

    Returns:
        out `(batch, new, heads, head_dim)`, and None in place of weights.
    """
    own = _is_own(getattr(module.config, NAME, None), attention_mask)
    if over_ranks.layer_name(module) is not None:
        if getattr(attention_mask, "ranks", None) is None:
            raise UnsupportedError(
                f"{type(module).__name__} runs over a mesh and its mask was not made in the model's forward: call the "
                "model that set_context_parallel got"
            )
        kwargs.pop("shift_labels", None)  # the loss has read them
    _refuse_arguments(module, own, kwargs if own else {**kwargs, "softcap": softcap})
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    given: dict[str, Any] = {"scale": scaling, "sinks": s_aux, "dropout_p": dropout}
    bias = bias_of(module, position_bias, q, k)
    if bias is not None:
        given["bias"] = bias
    if own:
        given["softcap"] = softcap
        return _attend_own(module, q, k, v, attention_mask, is_causal, kwargs, given), None
    shown = _shown_of(module, q, k, attention_mask, is_causal, kwargs)
    pattern, backend = pattern_of(module.config)
    _require_all_heads(module, q.shape[2], pattern)
    if shown.ranks is not None:
        _REPORTED[module] = f"{pattern!r}, over a mesh"
        given["backend"] = backend
        return shown.ranks.attend_dilated(_require_plain(shown), q, k, v, pattern, module, **given), None
    stop = shown.q_start + shown.queries - shown.k_start
    unknown_past = attention_mask is None and shown.q_start
    if getattr(module, "is_cross_attention", False) or stop != shown.keys or unknown_past:
        raise UnsupportedError(
            f"{type(module).__name__}: {shown.queries} queries over {shown.keys} keys; only self-attention is supported"
        )
    if attention_mask is not None and is_causal not in (None, shown.is_causal):
        raise UnsupportedError(
            f"{type(module).__name__} asks for is_causal={is_causal}, its mask is for is_causal={shown.is_causal}"
        )
    if not torch.compiler.is_compiling():
        _REPORTED[module] = repr(pattern)
    return _attend_dilated(module, _require_plain(shown), q, k, v, pattern, given | {"backend": backend}), None


def _attend_dilated(
    module: nn.Module, shown: Shown, q: Tensor, k: Tensor, v: Tensor, pattern: Dilated, given: dict[str, Any]
) -> Tensor:
    """Return dilated attention, of new tokens over a cache too. given: options of `attention`."""
    bias = given.get("bias")
    if shown.q_start:
        if bias is not None:
            raise UnsupportedError(
                f"{type(module).__name__}: a dilated layer takes no position_bias with a cache (use_cache=True)"
            )
        if given["dropout_p"]:
            raise UnsupportedError(
                f"dropout={given['dropout_p']} with a cache: use model.eval(), no past_key_values, or a model without "
                "attention dropout"
            )
        return _attend_cached(shown, q, k, v, pattern, scale=given["scale"], sinks=given["sinks"])
    lengths, order = real_first(shown.hidden) if torch.compiler.is_compiling() else shown.real
    if bias is not None and order is not None:
        raise UnsupportedError(
            f"{type(module).__name__}: a dilated layer takes no position_bias with padding before the tokens; pad after"
            " them, and under torch.compile give no padding"
        )
    if order is not None:
        q, k, v = (permuted(x, order) for x in (q, k, v))
    out = attended(q, k, v, pattern, is_causal=shown.is_causal, lengths=lengths, **given)
    return out if order is None else permuted(out, order.argsort(1))


def _attend_own(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    is_causal: bool | None,
    arguments: dict[str, Any],
    given: dict[str, Any],
) -> Tensor:
    """Return the model's own attention, and note what it was for `report`. given: the options of `attend`."""
    how = ""
    seen = with_compressed(module, mask, k)
    if not isinstance(seen, Chosen):
        shown = _shown_of(module, q, k, seen, is_causal, arguments)
        ranks = shown.ranks
        if ranks is not None:
            _REPORTED[module] = f"{shown.words}, over a mesh"
            return ranks.attend(shown, q, k, v, module, indices=arguments.get("indices"), **given)
        seen = as_listed(module, with_samples(shown, len(q), arguments), arguments)
    blocks = getattr(module, _CHOSEN, None)
    if isinstance(seen, Chosen):
        if "bias" in given:
            raise UnsupportedError(f"position_bias in a layer that chooses its keys: {remedy(module.config)}")
        out = attend_chosen(seen, q, k, v, **given)
    elif blocks is None or not blocks.serves(seen):
        out = attend(seen, q, k, v, **given)
        if is_for_operator(seen, q, k, given):
            how = "by scaled_dot_product_attention, quicker here"
    else:
        out, how = blocks.attend(seen, q, k, v, **given)
    if not torch.compiler.is_compiling():
        cap = "" if given["softcap"] is None else f"softcap {given['softcap']}"
        biased = "position_bias" if "bias" in given else ""
        _REPORTED[module] = ", ".join(filter(None, (seen.words, cap, biased, how)))
    return out


def _refuse_arguments(module: nn.Module, own: bool, arguments: dict[str, Any]) -> None:
    """Raise UnsupportedError for any argument that is not None, False or without effect (see `_WITHOUT_EFFECT`).

    own: the model's own attention is computed: accept what is read with the mask, too.
    """
    config = cast(PreTrainedConfig, module.config)
    for name, given in arguments.items():
        if given is None or given is False or name in _WITHOUT_EFFECT or (own and name in _READ_WITH_THE_MASK):
            continue
        if name == "sliding_window":
            raise UnsupportedError(f"{name}={given}: {_without_windows(config)}")
        advice = _REMEDIES.get(
            name, "dilated attention does not know this argument of the model's attention; remove it from the batch"
        )
        if own and name not in ("output_attentions", "cache"):
            advice += f", or {remedy(config)}"
        raise UnsupportedError(f"{name}: {advice}")


def _attend_cached(shown: Shown, q: Tensor, k: Tensor, v: Tensor, pattern: Dilated, **options: Any) -> Tensor:
    """Attend from new tokens to the tokens in the cache and to themselves. Return out, shaped like q, 0 at padding."""
    q, k, v = as_autocast(q, k, v)  # as attention does by itself
    if shown.hidden is None:
        return cached_attention(q, k, v, pattern, **options)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    for i, (new, every) in enumerate(shown.real_by_sample):
        part = cached_attention(q[i, new][None], k[i, every][None], v[i, every][None], pattern, **options)
        out[i, new] = part[0]
    return out


Mask = Shown | Refused | Chosen | Tensor | None
"""The values that a layer can receive as its mask."""


def _over_tokens(mask: Mask, batch: int, queries: int, keys: int) -> Mask:
    """Return what a mask over tokens shows, such as LayoutLM and MarkupLM make: `(batch or 1, 1, 1, keys)`, 0 at real
    tokens and less than -1,000 at padding. Return any other mask as it is; in a graph, other values raise."""
    if not isinstance(mask, Tensor) or mask.shape[1:] != (1, 1, keys) or not mask.is_floating_point():
        return mask
    hidden, traced = mask[:, 0, 0] < -1000, torch.compiler.is_compiling()
    readable = (mask[:, 0, 0].bool() == hidden).all()
    if traced:
        require_true(readable, "attention_mask must hold 0 at real tokens, below -1,000 at padding")
    elif not readable:
        return mask
    hidden = hidden.expand(batch, -1)
    some = hidden if traced or hidden.any() else None
    return Shown(False, q_start=keys - queries, queries=queries, keys=keys, hidden=some)


def _shown_of(
    module: nn.Module, q: Tensor, k: Tensor, mask: Mask, is_causal: bool | None, arguments: dict[str, Any]
) -> Shown:
    """Return what the mask of a layer shows; without a mask, what its other `arguments` tell (see `without_mask`)."""
    queries, keys = q.shape[1], k.shape[1]
    mask = _over_tokens(mask, len(q), queries, keys)
    own = getattr(module.config, NAME, None) is None  # else its pattern would replace the mask
    if own and isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[2:] == (queries, keys):
        return Shown(False, pairs=partial(layout_of_tensor, mask), q_start=keys - queries, queries=queries, keys=keys)
    if isinstance(mask, Refused):
        raise mask.error
    if mask is None:  # as in layers over images
        return without_mask(module, q, keys, is_causal, arguments)
    if not isinstance(mask, Shown):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UnsupportedError(
            f"attention_mask of shape {shape}: masks over pairs are not supported; give a mask over tokens, "
            "(batch, seq); for packed samples give position_ids alone, which restart with each sample, and "
            f"use_cache=False; or {remedy(module.config)}"
        )
    if (mask.queries, mask.keys) != (queries, keys):
        raise UnsupportedError(
            f"{type(module).__name__}: {queries} queries over {keys} keys, where the mask has {mask.queries} and "
            f"{mask.keys}; {remedy(module.config)}"
        )
    return mask


def _require_plain(shown: Mask) -> Shown:
    """Return what a mask shows if a dilated pattern can choose from it; raise UnsupportedError otherwise."""
    if not (isinstance(shown, Shown) and shown.is_plain):
        raise UnsupportedError(
            "the model asks for a mask that is neither causal nor bidirectional (packed sequences, bidirectional "
            "blocks, ...); it would be lost. For packed sequences, pad them and give attention_mask; give it too under "
            "torch.compile, where transformers takes every batch without one for packed"
        )
    if shown.q_start and not shown.is_causal and shown.ranks is None:
        raise UnsupportedError("bidirectional attention with a cache: earlier queries would miss later keys")
    return shown


register()
