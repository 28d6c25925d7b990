"""Convert checkpoints of other implementations, and compare them with what their own algorithm computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dilated_attention.models import (
    GigaPathSlideEncoder,
    LongNetAttention,
    LongNetLM,
    LongViT,
    Pretrained,
    load_gigapath,
    load_longvit,
    load_torchscale,
    read_weights,
)
from dilated_attention.nn import grid_sines
from dilated_attention_lab import released

Kind = Literal["gigapath", "longvit", "torchscale"]
WITHIN = 1e-3
"""The largest relative difference in norm that passes. Rounding in float32 stays below it, a wrong weight does not."""
MOST_TOKENS = 1 << 20
"""The most tokens of the random input: more would take hours, and show no more."""


@dataclass(frozen=True, slots=True)
class Parity:
    """Hold how two outputs differ: the greatest difference of any entry, and the difference's norm over the second
    output's norm."""

    name: str
    greatest: float
    relative: float


def convert(
    source: Path,
    out: Path,
    kind: Kind,
    *,
    tokens: int = 300,
    seed: int = 0,
    compat: Literal["torchscale"] | None = "torchscale",
    overwrite: bool = False,
    **options: Any,
) -> tuple[Pretrained, list[Parity]]:
    """Write a checkpoint as a folder that `from_pretrained` reads. Return the model and three comparisons.

    They compare, on random input in single precision:

    - a model with compat="torchscale" and the released algorithm (`released`), on the source's weights;
    - a model with compat=None and the released algorithm;
    - the model read back from the folder and the one written.

    Args:
        tokens: the most tokens of the random input. If a rate does not divide its segment length, the input is
            shorter than that segment: the released code puts results at the wrong tokens where it is full.
        compat: `compat` of the written model.
        overwrite: replace what `out` holds; otherwise a folder that is not empty is refused.
        options: arguments of `load_gigapath`, `load_longvit` or `load_torchscale`.

    Raises:
        ValueError: `out` is not empty, or the checkpoint cannot be read, does not fit, or computes something else than
            the released algorithm; nothing is written.
    """
    if not overwrite and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists: give overwrite=True, or another folder")
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"tokens={tokens}: a comparison takes 1 to {MOST_TOKENS}")
    load: Any = {"gigapath": load_gigapath, "longvit": load_longvit, "torchscale": load_torchscale}[kind]
    held = {name: x.float() for name, x in read_weights(source, options.get("prefix", "")).items()}
    models = {mode: load(held, compat=mode, **{**options, "prefix": ""}) for mode in ("torchscale", None)}
    generator = torch.Generator().manual_seed(seed)
    tokens = _tokens_in_place(models["torchscale"], tokens)
    inputs, reference = _reference(models["torchscale"], held, tokens, generator)
    with torch.no_grad():
        expected = reference()
        found = [
            _compare('compat="torchscale" and the released algorithm', inputs(models["torchscale"]), expected),
            _compare("corrected and the released algorithm", inputs(models[None]), expected),
        ]
        if not found[0].relative <= WITHIN:
            raise ValueError(
                f"{source}: the converted model differs from the released algorithm by {found[0].relative:.2g} of its "
                f"norm, more than {WITHIN}: these weights mean something else; nothing was written"
            )
        model = load(source, compat=compat, **options)
        model.save_pretrained(out)
        again = type(model).from_pretrained(out)
        found.append(_compare("read back and as written", inputs(again.float()), inputs(model.float())))
    return model, found


def _tokens_in_place(model: Pretrained, tokens: int) -> int:
    pattern = getattr(model.config, "encoder", model.config).pattern
    branches = zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)
    return min([tokens, *(segment - 1 for segment, rate in branches if segment % rate and segment > 1)])


def _reference(model: Any, held: dict[str, Tensor], tokens: int, generator: torch.Generator) -> tuple[Any, Any]:
    """Return two functions: one calls the model that it is given on the random input, the other runs the released
    algorithm on that input, with the weights `held`. `model`: its kind and configuration decide both."""
    config = getattr(model.config, "encoder", model.config)

    def options(x: Any, is_causal: bool = False) -> released.Attention:
        pattern = x.pattern
        return released.Attention(
            x.num_heads, pattern.segment_lengths, pattern.dilation_rates, is_causal, x.positions == "xpos"
        )

    def normal(channels: int) -> Tensor:
        return torch.randn(1, tokens, channels, generator=generator)

    def words(number: int | None) -> Tensor:
        assert number is not None
        return torch.randint(number, (1, tokens), generator=generator)

    if isinstance(model, GigaPathSlideEncoder):
        x = normal(model.config.in_chans)
        side, size = model.config.slide_ngrids, model.config.tile_size
        places = torch.randint(side, (1, tokens, 2), generator=generator)
        sines = grid_sines(places, side, config.embed_dim)
        return lambda m: m(x, places * size, global_pool=False), lambda: released.gigapath(
            held, x, sines, options(config)
        )
    if isinstance(model, LongViT):
        x = normal(config.embed_dim)
        prefix = "model.encoder." if "model.pos_embed" in held else "encoder."
        return lambda m: m.encoder(x), lambda: released.stack(held, prefix, x, options(config))
    if isinstance(model, LongNetAttention):
        x = normal(config.embed_dim)
        return lambda m: m(x), lambda: released.attention(held, "", x, options(config))
    if config.vocab_size is None:
        x = normal(config.embed_dim)
        return lambda m: m(x), lambda: released.stack(held, "", x, options(config))
    ids, is_causal = words(config.vocab_size), isinstance(model, LongNetLM)

    def language() -> Tensor:
        x = held["embed_tokens.weight"][ids]
        states = released.stack(held, "", x, options(config, is_causal))
        return _logits(held, states) if is_causal else states

    return lambda m: m(ids), language


def _logits(held: dict[str, Tensor], states: Tensor) -> Tensor:
    return states @ held.get("output_projection.weight", held["embed_tokens.weight"]).T


def _compare(name: str, actual: Tensor, expected: Tensor) -> Parity:
    difference = actual.double() - expected.double()
    return Parity(name, float(difference.abs().max()), float(difference.norm() / expected.double().norm()))
