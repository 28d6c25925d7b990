"""`bench model`: whole models: a slide encoder against the released algorithm, ragged slides, decoding, training."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from dilated_attention import Dilated
from dilated_attention.models import (
    GigaPathConfig,
    GigaPathSlideEncoder,
    KeyValueCache,
    LongNetConfig,
    LongNetLM,
    load_gigapath,
    tile_attention,
)
from dilated_attention.nn import grid_sines
from dilated_attention_lab import released
from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import contender
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.suites import Step, over
from dilated_attention_lab.training.loop import Recipe, Training
from dilated_attention_lab.training.text import read_text

HEADS, WIDTH, IN_CHANS, GRID = 16, 768, 1536, 1000
PATTERN = cast(Dilated, GigaPathConfig().encoder.pattern)
OURS, RIVAL, TILES = "ours, compat", "released algorithm", "tile attention"
SLIDES = (500, 1000, 2000, 3000, 4000, 6000, 8000, 10_000)
POSITIONS = (1000, 5000, 10_000, 20_000, 50_000, 100_000)
DENSE_POSITIONS = (1000, 5000, 10_000, 20_000)
WRITTEN = 32  # tokens decoded in a round
LANGUAGE = LongNetConfig(num_layers=4)
CONTEXT = 8192
LEARNERS = {"dilated": Dilated((512, 2048, 8192), (1, 4, 16)), "dense": None}


def steps(device: torch.device, quick: bool) -> list[Step]:
    tiles, layers = (1500, 1) if quick else (10_000, 12)
    return [
        Step(f"slide encoder, {tiles:,} tiles", lambda: _slide(tiles, layers, device, 5.0 if quick else 100.0)),
        Step("memory of the slide encoder and of tile attention", lambda: _slide_memory(tiles, layers, device)),
        Step("ragged slides", lambda: _ragged(SLIDES[: 3 if quick else None], device, 5.0 if quick else 30.0)),
        Step("decoding", lambda: _decoding(device, 5.0 if quick else 20.0)),
        Step("training", lambda: _training(device, 3 if quick else 200)),
    ]


def slide_weights(layers: int) -> dict[str, Tensor]:
    """Return random weights of GigaPath's slide encoder, under the names in its checkpoint."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {"cls_token": torch.randn(1, 1, WIDTH, generator=generator) / 50}

    def linear(name: str, rows: int, columns: int) -> None:
        weights[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * columns**-0.5
        weights[f"{name}.bias"] = torch.randn(rows, generator=generator) / 10

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = 1 + torch.randn(size, generator=generator) / 10
        weights[f"{name}.bias"] = torch.randn(size, generator=generator) / 10

    linear("patch_embed.proj", WIDTH, IN_CHANS)
    for i in range(layers):
        layer = f"encoder.layers.{i}"
        for name in ("q", "k", "v", "out"):
            linear(f"{layer}.self_attn.{name}_proj", WIDTH, WIDTH)
        linear(f"{layer}.ffn.fc1", 4 * WIDTH, WIDTH)
        linear(f"{layer}.ffn.fc2", WIDTH, 4 * WIDTH)
        for name in ("self_attn.inner_attn_ln", "self_attn_layer_norm", "final_layer_norm"):
            norm(f"{layer}.{name}", WIDTH)
        norm(f"{layer}.ffn.ffn_layernorm", 4 * WIDTH)
    norm("encoder.layer_norm", WIDTH)
    norm("norm", WIDTH)
    return weights


def slide(tiles: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random tiles of one slide: x `(1, tiles, IN_CHANS)`, and coords `(1, tiles, 2)` in pixels, integers."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, tiles, IN_CHANS, generator=generator)
    return x.to(device), torch.randint(GRID * 256, (1, tiles, 2), generator=generator).to(device)


def encoders(layers: int, tiles: int, device: torch.device, *names: str) -> dict[str, Any]:
    """Return by name functions without arguments, each of which runs on the same slide with its own copy of the same
    weights: this library's slide encoder (OURS), the released algorithm (RIVAL), tile attention (TILES)."""
    x, coords = slide(tiles, device)

    def encoder(name: str) -> Any:
        weights = slide_weights(layers)
        if name != RIVAL:
            model = load_gigapath(weights).to(device)
            return partial(tile_attention, model, x, coords) if name == TILES else partial(model, x, coords)
        weights = {name: tensor.to(device) for name, tensor in weights.items()}
        options = released.Attention(HEADS, PATTERN.segment_lengths, PATTERN.dilation_rates)
        sines = grid_sines(coords // 256, GRID, WIDTH)  # the released code keeps a table of them
        return partial(released.gigapath, weights, x, sines, options)

    return {name: torch.no_grad()(encoder(name)) for name in names}


def slide_parameters(seq_len: int, layers: int) -> dict[str, Any]:
    """Return the `parameters` of a result row about the slide encoder."""
    return {
        "seq_len": seq_len,
        "heads": HEADS,
        "head_dim": WIDTH // HEADS,
        "layers": layers,
        "segment_lengths": list(PATTERN.segment_lengths),
        "dilation_rates": list(PATTERN.dilation_rates),
        "dtype": "float32",
    }


def _slide(tiles: int, layers: int, device: torch.device, budget: float) -> Iterator[Row]:
    """Compare the slide encoder and tile attention: what both encoders compute, and times."""
    calls = encoders(layers, tiles, device, OURS, RIVAL, TILES)
    work = {name: measure.Noted(call, device) for name, call in calls.items()}
    rounds = measure.interleave(work, seconds=budget, device=device, least=2)
    parameters = slide_parameters(tiles, layers)

    ours, rival = work[OURS].result, work[RIVAL].result
    largest = float(((ours - rival).abs() / (2e-5 + 1e-4 * rival.abs())).max())
    name = "largest difference of the embeddings over its tolerance, 2e-5 + 1e-4 of the entry"
    yield Row(name, parameters, largest, "x", bar=1.0)
    name = "slide encoder: time over the released algorithm's"
    yield over(rounds, OURS, RIVAL, "forward", parameters, name, bar=1 / 1.3)
    yield over(rounds, TILES, OURS, "forward", parameters, "tile attention: time over one encoding", bar=1.5)


def _slide_memory(tiles: int, layers: int, device: torch.device) -> Iterator[Row]:
    request = {"tiles": tiles, "layers": layers, "device": str(device), "threads": torch.get_num_threads()}
    parameters = slide_parameters(tiles, layers)
    peaks = {way: measure.in_new_process(__name__, {**request, "name": way}) for way in (OURS, RIVAL, TILES)}
    unknown = measure.UNTOLD if None in peaks.values() else None
    for way in (OURS, RIVAL):
        name = f"slide encoder: peak memory above weights and input: {way}"
        yield Row(name, parameters, peaks[way], "bytes", refused=unknown)
    for name, way, other, bar in (
        ("slide encoder: peak memory over the released algorithm's", OURS, RIVAL, 0.5),
        ("tile attention: peak memory above weights and input, over one encoding", TILES, OURS, 1.3),
    ):
        yield Row(name, parameters, None if unknown else peaks[way] / peaks[other], "x", bar=bar, refused=unknown)


def _measure_peak(request: Mapping[str, Any]) -> int | None:
    device, name = torch.device(request["device"]), request["name"]
    torch.set_num_threads(request["threads"])
    encoders(1, 64, device, name)[name]()  # loads the operators and starts the threads
    return measure.peak_above_now(encoders(request["layers"], request["tiles"], device, name)[name], device)


def _ragged(tiles: tuple[int, ...], device: torch.device, budget: float) -> Iterator[Row]:
    layers = 2
    model: GigaPathSlideEncoder = load_gigapath(slide_weights(layers)).to(device)
    slides = [slide(count, device) for count in tiles]
    x, coords = (torch.nn.utils.rnn.pad_sequence([pair[i][0] for pair in slides], batch_first=True) for i in range(2))

    @torch.no_grad()
    def together() -> Tensor:
        return model(x, coords, lengths=tiles)

    @torch.no_grad()
    def one_by_one() -> Tensor:
        return torch.cat([model(*pair) for pair in slides])

    parameters = {**slide_parameters(max(tiles), layers), "tiles": list(tiles)}
    largest = float((together() - one_by_one()).abs().max())
    yield Row("ragged slides: largest difference to one by one", parameters, largest, "", bar=1e-5)
    contenders = {"together": contender(together), "one by one": contender(one_by_one)}
    rounds = measure.interleave(contenders, seconds=budget, device=device)
    name = "ragged slides: time over one by one"
    yield over(rounds, "together", "one by one", "forward", parameters, name, bar=1.05)


def cache_at(config: LongNetConfig, position: int, room: int, device: torch.device) -> KeyValueCache:
    """Return a cache after `position` tokens, with space for `room` more.

    Its values are random: the cost of a token does not depend on them.
    """
    cache = KeyValueCache(config, 1, max_len=position + room, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for layer in cache.layers:
        for _, _, keys, values in layer.buffers:
            keys.normal_(generator=generator)
            values.normal_(generator=generator)
    cache.positions = [position]
    return cache


def cache_bound(config: LongNetConfig) -> float:
    """Return the most bytes that a sample's keys and values take in float32, however long the sample grows."""
    assert isinstance(config.pattern, Dilated)
    branches = zip(config.pattern.segment_lengths, config.pattern.dilation_rates, strict=True)
    return 2 * config.num_layers * sum(w / r for w, r in branches) * config.embed_dim * 4


def _decoding(device: torch.device, budget: float) -> Iterator[Row]:
    most = 20
    dense = LongNetConfig(num_layers=LANGUAGE.num_layers, pattern=None)
    room = (most + 2) * WRITTEN
    runs = [("dilated", LANGUAGE, position) for position in POSITIONS]
    runs += [("dense", dense, position) for position in DENSE_POSITIONS]
    models = {name: LongNetLM(config).to(device).eval() for name, config, _ in runs[:: len(runs) - 1]}
    caches = {f"{name} at {position}": cache_at(config, position, room, device) for name, config, position in runs}
    token = torch.zeros(1, dtype=torch.int64, device=device)

    def decode(name: str, position: int) -> None:
        for _ in range(WRITTEN):
            models[name].decode(token, caches[f"{name} at {position}"])

    contenders = {f"{name} at {position}": contender(partial(decode, name, position)) for name, _, position in runs}
    rounds = measure.interleave(contenders, seconds=budget, device=device, most=most)

    def parameters(name: str, position: int) -> dict[str, Any]:
        pattern = None if name == "dense" else cast(Dilated, LANGUAGE.pattern)
        return {
            "method": name,
            "seq_len": position,
            "heads": LANGUAGE.num_heads,
            "head_dim": LANGUAGE.head_dim,
            "layers": LANGUAGE.num_layers,
            "segment_lengths": list(pattern.segment_lengths) if pattern else [],
            "dilation_rates": list(pattern.dilation_rates) if pattern else [],
        }

    for name, _, position in runs:
        case, key = parameters(name, position), f"{name} at {position}"
        yield Row.of(f"decoding, {name}: time a token", case, rounds.spread(key).scaled(1e3 / WRITTEN), "ms")
        yield Row(f"decoding, {name}: bytes of the cache", case, float(caches[key].nbytes), "bytes")
    case, key = parameters("dilated", POSITIONS[-1]), f"dilated at {POSITIONS[-1]}"
    name = "decoding: bytes of the cache over the bound, 2 layers x sum of w / r x width x 4"
    yield Row(name, case, caches[key].nbytes / cache_bound(LANGUAGE), "x", bar=1.0)
    ratio = rounds.ratio(key, f"dilated at {POSITIONS[1]}")
    yield Row.of(f"decoding: time a token over that at {POSITIONS[1]:,} tokens", case, ratio, bar=1.10)


def _training(device: torch.device, count: int) -> Iterator[Row]:
    """Train a small language model twice, dilated and dense, in turns, on the same bytes for `count` steps each."""
    text = read_text([])
    recipe = Recipe(context=CONTEXT, steps=count)
    options: dict[str, Any] = {"embed_dim": 64, "num_layers": 2, "num_heads": 2}
    models = {
        name: Training(LongNetConfig(pattern=pattern, **options), recipe, text, device=device)
        for name, pattern in LEARNERS.items()
    }
    for _ in range(count):
        for training in models.values():
            training.step()
    parameters = {"seq_len": CONTEXT, "heads": 2, "embed_dim": 64, "layers": 2, "steps": count, "text": text.source}
    rates = {name: [CONTEXT / spent for spent in training.seconds[1:]] for name, training in models.items()}
    bits = {name: training.held_out_bits_per_byte(16) for name, training in models.items()}
    for name in models:
        yield Row.of(f"training, {name}: speed", parameters, measure.Spread.of(rates[name]), "tokens/s")
        yield Row(f"training, {name}: held-out text", parameters, bits[name], "bits per byte")
    ratio = measure.Spread.of_ratios(rates["dilated"], rates["dense"])
    yield Row.of("training: speed of dilated over dense attention", parameters, ratio)
    share = bits["dilated"] / bits["dense"]
    yield Row("training: bits per byte of dilated over dense attention", parameters, share, "x")


if __name__ == "__main__":
    print(json.dumps(_measure_peak(json.loads(sys.argv[1]))))
