"""Count what the layers of a transformers model move between ranks that hold shards of a sequence, from its
configuration alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from dilated_attention import Dilated, UnsupportedError, Window
from dilated_attention.integrations.layer_masks import windows
from dilated_attention.integrations.own_attention import Shown, pattern_of_shown
from dilated_attention.parallel import ExchangePlan
from dilated_attention.parallel import exchange_plan as plan_of_call
from dilated_attention.plumbing import checks


@dataclass(frozen=True)
class LayerTraffic:
    """Hold what one rank moves in each of `count` layers that see the same.

    Attributes:
        pattern: what the layers show.
        plan: the traffic of one of them.
    """

    count: int
    pattern: Dilated | Window
    plan: ExchangePlan


@dataclass(frozen=True)
class ModelTraffic:
    """Hold what one rank moves in one step of a model, by kinds of layers.

    Attributes:
        ring_bytes: what ring attention would bring to the rank in a forward: the keys and values of all other ranks.
        ulysses_bytes: the same of an exchange of heads, as DeepSpeed's Ulysses makes; None: it needs more KV heads.
    """

    layers: tuple[LayerTraffic, ...]
    ring_bytes: int
    ulysses_bytes: int | None

    @property
    def bytes_received(self) -> int:
        """Return the bytes that the rank receives in a forward."""
        return sum([kind.count * kind.plan.bytes_received for kind in self.layers])

    @property
    def backward_bytes_received(self) -> int:
        """Return the bytes that the rank receives in a backward."""
        return sum([kind.count * kind.plan.backward_bytes_received for kind in self.layers])

    @property
    def modelled_seconds(self) -> float:
        """Return the modelled time of the forward's communication (see `ExchangePlan`)."""
        return sum([kind.count * kind.plan.modelled_seconds for kind in self.layers])

    def __str__(self) -> str:
        lines = []
        for kind in self.layers:
            rows = (
                f"{kind.plan.rows_received:,} rows, {kind.plan.bytes_received:,} bytes from {kind.plan.peers_received}"
            )
            lines.append(f"{kind.count} layers of {kind.pattern!r}: {rows} ranks each ({kind.plan.transport})")
        lines.append(f"a forward receives {self.bytes_received:,} bytes; ring attention {self.ring_bytes:,}")
        return "\n".join(lines)


def exchange_plan(
    model: PreTrainedModel | PreTrainedConfig,
    seq_len: int,
    world_size: int,
    *,
    rank: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    is_causal: bool = True,
) -> ModelTraffic:
    """Return what one rank moves in one step of a transformers model over ranks, without processes, weights or tensors.

    Args:
        model: the model, or its configuration.
        rank: default: the last, which receives most if attention is causal.
        is_causal: whether tokens see earlier ones alone; False for encoders.

    Raises:
        UnsupportedError: the configuration has layers that are not attention over a window, chunks or all keys. Those
            that list the keys of each query move the rows that their tokens choose.

    Examples:
        >>> from dilated_attention.integrations.huggingface import exchange_plan
        >>> from transformers import MistralConfig
        >>> config = MistralConfig(num_hidden_layers=2, num_key_value_heads=8, head_dim=128, sliding_window=1024)
        >>> plan = exchange_plan(config, seq_len=2**20, world_size=8)
        >>> plan.layers[0].plan.rows_received  # the last 1,023 tokens of the rank before, for each of 8 heads
        8184
    """
    config = model if isinstance(model, PreTrainedConfig) else model.config
    config = config.get_text_config()
    seq_len = checks.positive("seq_len", seq_len)
    world_size = checks.positive("world_size", world_size)
    rank = world_size - 1 if rank is None else checks.integer("rank", rank, 0, world_size - 1)
    heads, kv_heads, head_dim = _sizes(config)
    counted = Counter([_pattern(config, kind, seq_len, is_causal) for kind in _kinds(config)])
    layers = []
    for pattern, count in counted.items():
        plan = plan_of_call(
            pattern, seq_len, heads, world_size, rank, num_kv_heads=kv_heads, head_dim=head_dim, batch=batch,
            dtype=dtype, is_causal=is_causal, transport="auto",
        )  # fmt: skip
        layers.append(LayerTraffic(count, pattern, plan))
    shard = seq_len // world_size
    head_bytes = batch * head_dim * dtype.itemsize * sum(counted.values())  # of one token, in all layers
    ring = 2 * (seq_len - shard) * kv_heads * head_bytes
    ulysses = None
    if kv_heads % world_size == 0:
        ulysses = 2 * (shard - shard // world_size) * (heads + kv_heads) * head_bytes
    return ModelTraffic(tuple(layers), ring, ulysses)


def _sizes(config: Any) -> tuple[int, int, int]:
    """Return the numbers of query heads and KV heads, and the width of a head."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # keys and values of all heads are made before the attention
        return heads, heads, max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, kv_heads, head_dim


def _kinds(config: Any) -> list[str]:
    """Return the kind of each attention layer."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return list(kinds)
    return ["sliding_attention" if windows(config) else "full_attention"] * config.num_hidden_layers


def _pattern(config: Any, kind: str, seq_len: int, is_causal: bool) -> Dilated | Window:
    """Return the pattern of a kind of layer."""
    options = getattr(config, "dilated_attention", None)
    if options is not None and (kind == "full_attention" or options.get("layers", "all") == "all"):
        given = {name: options[name] for name in ("offsets", "head_groups") if name in options}
        return Dilated(options["segment_lengths"], options["dilation_rates"], **given)
    shown = Shown(is_causal, queries=seq_len, keys=seq_len)
    if kind == "sliding_attention":
        shown = replace(shown, window=config.sliding_window)
    elif kind == "chunked_attention":
        shown = replace(shown, chunk=config.attention_chunk_size)
    elif kind != "full_attention":
        raise UnsupportedError(
            f"{type(config).__name__} has layers of kind {kind}, whose traffic the configuration alone does not tell"
        )
    return pattern_of_shown(shown, 0, seq_len)[0]
