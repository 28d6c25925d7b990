"""Show what dilated attention can do, in a few minutes: recall over a long sequence, and a model of real text."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from dilated_attention import Dilated
from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.plumbing import storage
from dilated_attention_lab.environment import environment
from dilated_attention_lab.pictures import save_recall_and_context
from dilated_attention_lab.terminal import progress
from dilated_attention_lab.training import recall
from dilated_attention_lab.training.byte_model import ByteLM, learn
from dilated_attention_lab.training.text import Split, read_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

CONTEXT, NEAR = 8192, 256
"""Bytes of context for the byte model, and the shorter context to compare it with."""
TEXT = LongNetConfig(embed_dim=64, num_layers=2, num_heads=4, pattern=Dilated((2048, CONTEXT), (1, 4)), positions=None)
CONTEXTS = (16, 64, NEAR, 1024)
SCORED = CONTEXT // 8
"""Bytes at the end of each held-out window that are scored, whatever context they are given."""
QUESTIONS, FAR_QUESTIONS = 4, 80
HELD_OUT = 32  # windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Hold what the demo found, one line of `figures.jsonl`.

    Attributes:
        window, window_reach: tokens of the local window, and how far back the last token reaches through all layers.
        window_cost: the window's score entries divided by those of dilated attention.
        near, far: share of right answers by model where the fact is within the window's reach, and where it is beyond.
        by_distance: share of right answers by model and distance.
        lessons: optimizer steps by sequence length, the same for both models.
        step_seconds: seconds of a forward and backward over one sequence of `tokens`, by attention.
        text_bytes: bytes read in training.
        bits: bits per held-out byte, by the bytes of context that the model may use.
    """

    tokens: int
    window: int
    window_reach: int
    window_cost: float
    near: Mapping[str, float]
    far: Mapping[str, float]
    by_distance: Mapping[str, Mapping[int, float]]
    lessons: Mapping[int, int]
    step_seconds: Mapping[str, float]
    text_bytes: int
    text_seconds: float
    bits: Mapping[int, float]


def demo(out: Path, console: Console, *, tokens: int, seconds: float, seed: int, device: torch.device) -> int:
    """Run recall and training on text, print and save what they found: figures.jsonl, demo.png. Returns 0.

    Args:
        tokens: length of the sequence with the fact. seconds: time of training on text.
    """
    text = read_text([]).split(CONTEXT)
    out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    console.print(
        f"1. recall: a fact anywhere in {tokens:,} tokens, a question at the end\n"
        f"2. text: {seconds:.0f} s of training on the Python standard library's sources, byte by byte\n"
        f"On 2 CPU cores the first takes about {100 * tokens / 32768 + 40:.0f} s.",
    )
    found = Demo(tokens=tokens, **_recall(console, tokens, seed, device), **_text(console, text, seconds, seed, device))
    row = asdict(found) | {"environment": environment(device)}
    row |= {"seconds": time.perf_counter() - begin, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    storage.write_text(out / "figures.jsonl", json.dumps(row) + "\n")
    lines = {**found.by_distance, "chance": dict.fromkeys(found.by_distance["dilated"], recall.CHANCE)}
    save_recall_and_context(out / "demo.png", lines, QUESTIONS, found.bits)
    console.print(_table(found))
    console.print("\n".join(sentences(found)))
    console.print(f"{row['seconds']:.0f} s in all; saved in {out}: figures.jsonl, demo.png", soft_wrap=True)
    return 0


def _recall(console: Console, tokens: int, seed: int, device: torch.device) -> dict[str, Any]:
    models = recall.models(tokens, seed, device)
    window = recall.window_of_equal_cost(tokens)
    reach = recall.window_reach(window)
    lessons = _learn(console, models, tokens, seed)
    step_seconds = _step_seconds(console, models["dilated"], tokens, device)
    distances = [*(4**i for i in range(tokens.bit_length() // 2) if 4**i < tokens - 1), tokens - 1]
    by_distance: dict[str, dict[int, float]] = {name: {} for name in models}
    far: dict[str, float] = {}
    with progress(console, f"questions at {tokens:,} tokens", len(models) * (len(distances) + 1)) as advance:
        for name, model in models.items():
            generator = torch.Generator().manual_seed(seed)
            for distance in distances:
                places = range(distance, distance + 1)
                by_distance[name][distance] = recall.accuracy(model, tokens, generator, QUESTIONS, places)
                advance(1, f"{name}, distance {distance:,}")
            far[name] = recall.accuracy(model, tokens, generator, FAR_QUESTIONS, range(reach + 1, tokens))
            advance(1, f"{name}, beyond {reach:,}: {far[name]:.0%} right")
    return {
        "window": window,
        "window_reach": reach,
        "window_cost": recall.window_entries(tokens, window) / recall.dilated_entries(tokens),
        "near": {
            name: statistics.fmean(x for d, x in rates.items() if d <= reach) for name, rates in by_distance.items()
        },
        "far": far,
        "by_distance": by_distance,
        "lessons": lessons,
        "step_seconds": step_seconds,
    }


def _learn(console: Console, models: Mapping[str, LongNetLM], tokens: int, seed: int) -> dict[int, int]:
    """Train both models of `recall.models` by `recall.learn`. Return the steps, the same for both, by sequence length.

    The dilated model comes first: each stage ends above a running mean of 98 % right answers, or after `MOST_STEPS`.
    The window model then takes as many steps in each stage. tokens: the length that no stage's sequences exceed.
    """
    steps: dict[int, int] = {}
    for name, model in models.items():
        generator, limit = torch.Generator().manual_seed(seed), dict(steps) or recall.MOST_STEPS
        until = math.inf if steps else 0.98
        total, spent = sum(limit.values()), 0
        with progress(console, f"recall, {name}", total) as advance:
            for lesson in recall.learn(model, tokens, generator, limit, until=until):
                steps[lesson.tokens] = lesson.step
                spent += 1
                advance(1, f"{lesson.tokens:,} tokens: {lesson.accuracy:.0%} right")
            advance(total - spent, f"{lesson.tokens:,} tokens: {lesson.accuracy:.0%} right")
    return steps


def _step_seconds(console: Console, dilated: LongNetLM, tokens: int, device: torch.device) -> dict[str, float]:
    """Return by name the seconds of a forward and backward over one sequence of `tokens`: "dilated", of that model, and
    "dense", of a new model with dense attention. Each is the least of two or three runs."""
    dense = LongNetLM(recall.config(None)).to(device)
    pair = [x.to(device) for x in recall.draw(1, tokens, torch.Generator().manual_seed(0))]
    found = {}
    with progress(console, f"a step over {tokens:,} tokens", 5) as advance:
        for name, model, repeats in (("dilated", dilated, 3), ("dense", dense, 2)):
            times = []
            for _ in range(repeats):
                begin = time.perf_counter()
                recall.step(model, *pair)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter() - begin)
                advance(1, f"{name}: {times[-1]:.2f} s")
            found[name] = min(times)
    return found


def _text(console: Console, split: Split, seconds: float, seed: int, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = ByteLM(TEXT).to(device)
    read, spent = train(console, model, split, seconds, seed)
    held_out = split.sample_held_out(HELD_OUT)
    with progress(console, "held-out text", len(CONTEXTS) + 1) as advance:
        bits = {}
        for context in (*CONTEXTS, CONTEXT):
            bits[context] = bits_per_byte(model, held_out.to(device), context)
            advance(1, f"{context:,} bytes of context")
    return {"text_bytes": read, "text_seconds": spent, "bits": bits}


def train(console: Console, model: ByteLM, split: Split, seconds: float, seed: int) -> tuple[int, float]:
    """Train for about `seconds`. Returns the number of bytes that were read, and the seconds that it took."""
    generator, read = torch.Generator().manual_seed(seed), 0
    begin = time.perf_counter()

    def spent() -> float:
        return time.perf_counter() - begin

    with progress(console, "text", seconds) as advance:
        shown = 0.0
        for windows, loss in learn(model, split, generator, lambda _: spent() / seconds if seconds else 1.0):
            read += windows.numel()
            now = spent()
            advance(now - shown, f"{loss / math.log(2):.2f} bits per byte")
            shown = now
    return read, spent()


@torch.no_grad()
def bits_per_byte(model: LongNetLM, windows: Int[Tensor, "windows bytes"], context: int) -> float:
    """Return bits per byte over the last `SCORED` bytes of each window.

    The model sees `context` to 1.25 `context` bytes before each of them, or fewer where the window begins later.
    """
    bits = []
    stretch = min(SCORED, max(1, context // 4))
    before = min(context, windows.shape[1] - 1 - SCORED)
    first = windows.shape[1] - 1 - SCORED
    for window in windows:
        pieces = torch.stack([window[at - before : at + stretch + 1] for at in range(first, first + SCORED, stretch)])
        logits = model(pieces[:, :-1].long())[:, before:]
        bits.append(F.cross_entropy(logits.flatten(0, 1), pieces[:, before + 1 :].flatten().long()).item())
    return statistics.fmean(bits) / math.log(2)


def _table(found: Demo) -> Table:
    from rich.table import Table

    table = Table("", title="What was found", title_justify="left")
    table.add_column("dilated", justify="right")
    table.add_column("other", justify="right")
    table.add_column("what the other is")
    seconds, bits, reach = found.step_seconds, found.bits, found.window_reach
    window = f"window of {found.window} tokens, {found.window_cost:.2f} times the score entries"
    chance = f"{recall.CHANCE:.1%}"
    for name, ours, other, what in (
        (f"right answers, fact at most {reach:,} tokens away", *_shares(found.near), window),
        (f"right answers, fact farther away in {found.tokens:,}", *_shares(found.far), f"{window}; chance {chance}"),
        (f"training step, {found.tokens:,} tokens", *(f"{x:.2f} s" for x in seconds.values()), "dense attention"),
        ("bits per held-out byte", f"{bits[CONTEXT]:.3f}", f"{bits[NEAR]:.3f}", f"its context cut to {NEAR} bytes"),
    ):
        table.add_row(name, ours, other, what)
    return table


def _shares(rates: Mapping[str, float]) -> tuple[str, str]:
    return f"{rates['dilated']:.1%}", f"{rates['window']:.1%}"


def sentences(found: Demo) -> list[str]:
    """Return what the figures justify saying, and nothing else."""
    said = []
    longest = max(found.lessons)
    if min(found.far["dilated"], found.near["dilated"]) >= 0.95:
        trained = f"Trained on at most {longest:,} tokens, dilated" if longest < found.tokens else "Dilated"
        said.append(f"{trained} attention answers about a fact anywhere in {found.tokens:,}.")
    if abs(found.far["window"] - recall.CHANCE) <= 0.05 and found.far["dilated"] >= 0.95:
        said.append(
            f"The same model with a local window of at least its cost guesses where the fact is more than "
            f"{found.window_reach:,} tokens away."
        )
    ratio = found.step_seconds["dilated"] / found.step_seconds["dense"]
    if ratio < 1:
        said.append(f"A training step over {found.tokens:,} tokens takes {ratio:.2f} of the time of dense attention.")
    bits, near = found.bits[CONTEXT], found.bits[NEAR]
    if bits < near:
        said.append(
            f"With all its context the byte model needs {1 - bits / near:.1%} fewer bits than with the last "
            f"{NEAR} bytes."
        )
    return said or ["These figures show no advantage."]
