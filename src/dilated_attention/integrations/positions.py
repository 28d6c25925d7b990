"""Lengthen the positions of a transformers model, and check that a text fits its table of learned positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from dilated_attention import UnsupportedError
from dilated_attention.plumbing import checks


def extend_positions(model: PreTrainedModel, length: int) -> PreTrainedModel:
    """Change a transformers model, in place, to take `length` tokens, and return it. Call it before the optimizer is
    made.

    Learned positions (BERT, RoBERTa, GPT-2, OPT, ...) are repeated: position p gets the vector that was trained for
    p modulo the number of trained positions, as in Longformer (arXiv:2004.05150). Neighbouring positions then differ as
    before. Rotary positions need no table: `config.max_position_embeddings` is raised, and the scaling of the rotation,
    if any, stays the same: where transformers would compute its factor from the greatest length, the present factor is
    written into the configuration. Either way, fine-tune the model at the new length.

    Raises ValueError, before anything is changed, if the model has neither kind of positions, if its positions are
    sinusoids or do not count from 0, if its rotation is scaled by the length of a text (`"dynamic"`), or if `length` is
    not larger than before.

    Examples:
        >>> from dilated_attention.integrations.huggingface import extend_positions
        >>> from transformers import GPT2Config, GPT2Model
        >>> config = GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=4)
        >>> model = extend_positions(GPT2Model(config), 2048)
        >>> model.config.max_position_embeddings
        2048
    """
    require_transformers(model)
    length = checks.positive("length", length)
    found, config = _position_tables(model), model.config.get_text_config()
    rotary = any("Rotary" in type(module).__name__ for module in model.modules())
    counts = [x for part in ("", "encoder_", "decoder_") if getattr(config, x := f"max_{part}position_embeddings", 0)]
    if not counts or not (found or rotary):
        raise UnsupportedError(
            f"{type(model).__name__} has neither a table of learned positions nor rotary ones, or no "
            "config.max_position_embeddings to raise; an image model interpolates its own: give its forward "
            "interpolate_pos_encoding=True"
        )
    rotations = _rotations(config) if rotary else []
    most = max((table.num_embeddings - first for _, table, first in found), default=getattr(config, counts[0]))
    if length <= most:
        raise ValueError(f"length must be above the {most} tokens that the model takes already; got {length}")
    # A configuration counts the rows for padding, too.
    padded = max((first for _, table, first in found if table.padding_idx is not None), default=0)
    for owner, embedding, first in found:
        rows = torch.arange(max(first, padded) + length, device=embedding.weight.device)
        rows[first:] = first + (rows[first:] - first) % (embedding.num_embeddings - first)
        embedding.weight = nn.Parameter(embedding.weight.detach()[rows], embedding.weight.requires_grad)
        embedding.num_embeddings = len(rows)
        for name, step in (("position_ids", 1), ("token_type_ids", 0)):
            if name in owner._buffers:
                setattr(owner, name, step * torch.arange(len(rows))[None].to(owner._buffers[name]))
    for module in model.modules():
        mask = getattr(module, "bias", None)
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:  # GPT-Neo and ImageGPT: earlier keys, or a window
            window = config.window_size if getattr(module, "attention_type", None) == "local" else length
            earlier = mask.new_ones(1, 1, length, length).tril()
            module.bias = earlier & ~earlier.tril(-window)
    for rotation in rotations:
        if rotation["rope_type"] in ("yarn", "longrope") and rotation.get("factor") is None:
            first = rotation.setdefault("original_max_position_embeddings", config.max_position_embeddings)
            rotation["factor"] = config.max_position_embeddings / first
    if getattr(config, "max_relative_positions", 1) < 1:  # DeBERTa: as many as tokens
        config.max_relative_positions = config.max_position_embeddings
    for name in counts:
        setattr(config, name, length + padded)
    return model


_TABLES = "position_embeddings", "box_position_embeddings", "visual_position_embeddings", "wpe", "embed_positions"


def require_transformers(model: Any) -> None:
    """Raise ValueError unless `model` is one of transformers."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model must be a transformers PreTrainedModel; got {type(model).__name__}. If it holds one, "
            "give that one; nn.MultiheadAttention is for dilated_attention.integrations.convert_attention"
        )


def _position_tables(model: PreTrainedModel) -> list[tuple[nn.Module, nn.Embedding, int]]:
    """Return (owner, table, first) for each table of learned positions, with the row of the first position: some begin
    after a row for padding, or two. Raises UnsupportedError if it cannot be repeated."""
    found = [
        (owner, table, getattr(table, "offset", 0 if table.padding_idx is None else table.padding_idx + 1))
        for owner in model.modules()
        for name in _TABLES
        if isinstance(table := getattr(owner, name, None), nn.Embedding)
    ]
    for owner, table, _ in found:
        name, places = type(owner).__name__, getattr(owner, "position_ids", None)
        if "Sinusoidal" in type(table).__name__:
            raise UnsupportedError(
                f"{name} has a table of sinusoids, {type(table).__name__}, which do not repeat; transformers makes a "
                "longer one: from_pretrained(..., max_position_embeddings=length, ignore_mismatched_sizes=True)"
            )
        shifted = isinstance(places, Tensor) and not places.is_meta and places.flatten()[:1].any()
        if shifted or hasattr(table, "max_length"):  # ProphetNet looks further than its last token
            raise UnsupportedError(
                f"{name} counts positions in a way of its own: extend_positions cannot tell which rows of its table "
                "are positions; choose a model that counts from 0"
            )
    return found


def _rotations(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of rotary positions: one set, or one for each kind of layer.

    Raises UnsupportedError if the rotation depends on the length of a text.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    rotations = [x for x in (parameters, *parameters.values()) if isinstance(x, dict) and "rope_type" in x]
    for rotation in rotations:
        kind = rotation["rope_type"]
        if "dynamic" in kind:
            raise UnsupportedError(
                f"{type(config).__name__}.rope_parameters has rope_type={kind!r}: the rotation is scaled beyond "
                "max_position_embeddings, and would change; the model takes longer texts as it is"
            )
    return rotations


def position_table(module: nn.Module) -> nn.Embedding | None:
    """Return a module's table of learned positions, one row per position as in BERT or GPT-2; None if it has none.

    Subclasses of nn.Embedding, and tables with a row for padding, are left out: their models number only real tokens.
    """
    for name in ("position_embeddings", "wpe"):
        table = getattr(module, name, None)
        if type(table) is nn.Embedding and table.padding_idx is None:
            return table
    return None


def has_numbering_of_its_own(model: nn.Module) -> bool:
    """Return whether some module has a table of learned positions whose rows are not simply those of positions."""
    for module in model.modules():
        own = position_table(module)
        for name in _TABLES:
            table = getattr(module, name, None)
            if isinstance(table, nn.Embedding) and table is not own:
                return True
    return False


def require_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError, before the forward of a module with a table of positions, if the table is too short.

    Nothing is checked if the caller gives the positions.
    """
    tokens = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    table = position_table(module)
    if table is None or not isinstance(tokens, Tensor) or kwargs.get("position_ids") is not None:
        return
    cache = kwargs.get("cache", kwargs.get("past_key_values"))  # its name from transformers 5.24 on, and before
    past = kwargs.get("past_key_values_length", 0) if cache is None else cache.get_seq_length()
    count = past + tokens.shape[1]
    if count > table.num_embeddings:
        raise ValueError(
            f"{count} tokens, but {type(module).__name__} has {table.num_embeddings} learned positions: shorten the "
            "text (tokenizer(..., truncation=True)), or lengthen the table: extend_positions(model, length)"
        )
