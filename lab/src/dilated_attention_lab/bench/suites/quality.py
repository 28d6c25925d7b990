"""`bench quality`: what a pattern keeps of dense attention's quality: recall by distance and length, bits per byte."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention import Dilated, Sum, Window
from dilated_attention.models import BlockMixture, IndexedKeys, LongNetConfig, NativeSparse
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.suites import Step
from dilated_attention_lab.training import recall
from dilated_attention_lab.training.byte_model import ByteLM, learn
from dilated_attention_lab.training.text import Split, read_text

IN_STEPS = ("dilated", "dense", "window")
IN_TIME = ("dilated", "dense", "window and dilated", "native sparse attention", "mixture of blocks", "indexed keys")
EQUAL_STEPS, EQUAL_TIME = "equal steps", "equal time"
RATES = (1, 1, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Describe trainings on pieces of text. All attentions but dense show a token about as many keys on average.

    Attributes:
        context: bytes of a piece.
        segments: segments of the dilated model, two near ones at rate 1 and the whole piece at rate 4.
        window: tokens of the local window, a few more than a token of the dilated model sees on average. An indexer
            chooses as many.
        num_selected: blocks of 64 keys that native sparse attention selects, next to a window and the compressed keys.
        top_k: blocks of 256 keys that the mixture of blocks selects.
        steps: optimizer steps of each attention of IN_STEPS, in the comparison after equal steps.
        seconds: training time of each attention of IN_TIME, in the comparison after equal time.
    """

    context: int
    segments: tuple[int, int, int]
    window: int
    num_selected: int
    top_k: int
    steps: int
    seconds: float

    def options(self, attention: str) -> dict[str, Any]:
        """Return what `LongNetConfig` takes for the attention of that name."""
        near, second, far = self.segments
        patterns: dict[str, Dilated | Window | Sum] = {
            "dilated": Dilated(self.segments, RATES),
            "window": Window(self.window - 1),
            "window and dilated": Window(second // 2 - 1) + Dilated((near, far), (1, RATES[-1])),
        }
        selections = {
            "native sparse attention": NativeSparse(num_selected=self.num_selected),
            "mixture of blocks": BlockMixture(top_k=self.top_k),
            "indexed keys": IndexedKeys(top_k=self.window),
        }
        return {"pattern": patterns.get(attention), "selection": selections.get(attention)}

    def parameters(self, seed: int) -> dict[str, Any]:
        case = {"seq_len": self.context, "segment_lengths": [*self.segments], "dilation_rates": [*RATES]}
        return {**case, "heads": 4, "layers": 2, "seed": seed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Say how much is measured.

    Attributes:
        lengths: sequence lengths of recall.
        questions: questions to each model per length and range of distances.
        most_steps: the most training steps of each stage of recall, by its number of tokens.
        seeds: number of seeds for each training on text.
        held_out: number of held-out windows of text to measure on.
    """

    lengths: tuple[int, ...]
    questions: int
    most_steps: Mapping[int, int]
    texts: tuple[Text, ...]
    seeds: int
    held_out: int


# The near segments begin at different places, and grow with the length (docs/quality.md). The pieces of equal steps are
# half as many as at 8,192 bytes, each four times as long.
WHOLE = Size(
    lengths=(2048, 8192, 32768, 131072, 262144),
    questions=16,
    most_steps=recall.MOST_STEPS,
    texts=(
        Text(context=8192, segments=(1024, 1408, 8192), window=1536, num_selected=16, top_k=6,
             steps=400, seconds=60.0),
        Text(context=32768, segments=(2048, 2816, 32768), window=3584, num_selected=32, top_k=14,
             steps=200, seconds=240.0),
    ),
    seeds=3,
    held_out=32,
)  # fmt: skip
QUICK = Size(
    lengths=(512,),
    questions=1,
    most_steps=dict.fromkeys(recall.MOST_STEPS, 1),
    texts=(Text(context=512, segments=(64, 80, 512), window=96, num_selected=3, top_k=1, steps=2, seconds=0.1),),
    seeds=1,
    held_out=1,
)


def steps(device: torch.device, quick: bool) -> list[Step]:
    size = QUICK if quick else WHOLE
    longest = max(size.lengths)
    found = [Step("recall", partial(_recall, size, longest, device))]
    for text in size.texts:
        for seed in range(size.seeds):
            for run, equal in ((_equal_steps, EQUAL_STEPS), (_equal_time, EQUAL_TIME)):
                measure = partial(run, text, seed, held_out=size.held_out, device=device)
                found.append(Step(f"text, {text.context:,} bytes, {equal}, seed {seed}", measure))
    return found


@cache
def _sources(context: int) -> Split:
    """Return PyTorch's own Python sources, which every machine that runs this has: tens of megabytes, split into
    training text and held-out windows of `context` + 1 bytes."""
    files = sorted(Path(torch.__file__).parent.rglob("*.py"))
    return read_text([file for file in files if file.stat().st_size]).split(context)


def _recall(size: Size, longest: int, device: torch.device) -> Iterator[Row]:
    models = recall.models(longest, 0, device)
    window = recall.window_of_equal_cost(longest)
    reach = recall.window_reach(window)
    taken: dict[int, int] = {}
    for name, model in models.items():
        generator, limit = torch.Generator().manual_seed(0), dict(taken) or size.most_steps
        for lesson in recall.learn(model, longest, generator, limit, until=math.inf if taken else 0.98):
            if name == "dilated":
                taken[lesson.tokens] = lesson.step
    for length in size.lengths:
        for name, model in models.items():
            generator = torch.Generator().manual_seed(1)
            parameters = {"seq_len": length, "heads": recall.HEADS, "method": name, "reach": reach, "layers": 2}
            for first, last in _distances(reach, length):
                answered = recall.accuracy(model, length, generator, size.questions, range(first, last))
                where = {**parameters, "distance": [first, last - 1], "questions": size.questions}
                yield Row("recall: right answers; chance is 0.0625", where, answered, "")


def _distances(reach: int, length: int) -> list[tuple[int, int]]:
    """Return ranges of distances in tokens, (first, last + 1): one within the window's reach, then ranges whose ends
    grow fourfold up to `length`."""
    edges = [1, min(reach + 1, length)]
    while edges[-1] < length:
        edges.append(min(4 * edges[-1], length))
    return list(pairwise(edges))


def _model(attention: str, text: Text, seed: int, device: torch.device) -> ByteLM:
    torch.manual_seed(seed)
    config = LongNetConfig(embed_dim=64, num_layers=2, num_heads=4, positions=None, **text.options(attention))
    return ByteLM(config).to(device)


def _equal_steps(text: Text, seed: int, *, held_out: int, device: torch.device) -> Iterator[Row]:
    """Train every attention on the same bytes for the same number of steps, and measure it on `held_out` windows."""
    windows = _sources(text.context).sample_held_out(held_out).to(device)
    case = {**text.parameters(seed), "window": text.window, "steps": text.steps}
    bits: dict[str, float] = {}
    for attention in IN_STEPS:
        model = _model(attention, text, seed, device)
        _train(model, text.context, seed, lambda done: done / text.steps)
        bits[attention] = _held_out_bits(model, windows)
        yield Row(f"text, {attention}, {EQUAL_STEPS}: held-out text", case, bits[attention], "bits per byte")
    yield Row(f"text: dilated over dense, {EQUAL_STEPS}", case, bits["dilated"] / bits["dense"], "x", bar=1.02)


def _equal_time(text: Text, seed: int, *, held_out: int, device: torch.device) -> Iterator[Row]:
    """Train every attention of IN_TIME for the same time, a third of it on short pieces.

    All read the bytes in the same order, and are measured on `held_out` windows.
    """
    windows = _sources(text.context).sample_held_out(held_out).to(device)
    bits: dict[str, float] = {}
    for attention in IN_TIME:
        shown = next(filter(None, text.options(attention).values()), None)
        case = {**text.parameters(seed), "seconds": text.seconds, "attention": repr(shown)}
        model = _model(attention, text, seed, device)
        steps = _train(model, text.context, seed, _clock(text.seconds))
        yield Row(f"text, {attention}, {EQUAL_TIME}: steps", case, float(steps), "")
        bits[attention] = _held_out_bits(model, windows)
        yield Row(f"text, {attention}, {EQUAL_TIME}: held-out text", case, bits[attention], "bits per byte")
    case = {**text.parameters(seed), "seconds": text.seconds}
    yield Row(f"text: dilated over dense, {EQUAL_TIME}", case, bits["dilated"] / bits["dense"], "x", bar=0.95)


def _train(model: ByteLM, context: int, seed: int, progress: Callable[[int], float]) -> int:
    """Train a model, and return the number of steps. The seed gives the order of the bytes that they read.

    `progress` maps the number of steps to the fraction of the training done.
    """
    generator = torch.Generator().manual_seed(seed)
    return sum(1 for _ in learn(model, _sources(context), generator, progress))


def _clock(seconds: float) -> Callable[[int], float]:
    """Return a function that gives the fraction of `seconds` that has passed since this call, whatever its argument."""
    begin = time.perf_counter()
    return lambda _: (time.perf_counter() - begin) / seconds


@torch.no_grad()
def _held_out_bits(model: ByteLM, windows: Tensor) -> float:
    """Return the mean bits per byte of the windows."""
    losses = []
    for window in windows:
        logits = model(window[None, :-1].long())[0]
        losses.append(F.cross_entropy(logits, window[1:].long()).item())
    return statistics.fmean(losses) / math.log(2)
