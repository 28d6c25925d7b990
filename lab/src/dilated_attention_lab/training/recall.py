"""Train models to recall a fact from anywhere in a sequence, one with dilated attention and one with a local window.

The last token is the question: the model answers with the fact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dilated_attention import Dilated, Window
from dilated_attention.models import LongNetConfig, LongNetLM

VALUES, FILLERS = 16, 48
"""Token ids: 0 to 15 are facts, 16 is the question, and the next 48 are fillers."""
CHANCE = 1 / VALUES
SEGMENT, MIDDLE = 128, 2048
LAYERS, HEADS, WIDTH = 2, 4, 64
CURRICULUM = ((128, 32), (512, 8), (2048, 4))
"""Tokens per sequence and sequences per step, by stage: what is learned on short sequences holds on longer ones."""
MOST_STEPS = {128: 400, 512: 300, 2048: 60}
"""The most steps of each stage, by its number of tokens."""


def pattern(tokens: int) -> Dilated:
    """Return three branches: segments of 128, 2,048 and `tokens` (at least 2,048), at rates 1, 16 and 128.

    Every head takes the last residue: tokens 127, 255, … take part in all. `tokens` should be a multiple of 128.

    In layer 1 each of these tokens sees its segment of 128; in layer 2 the last token, the question, sees all of them.
    So two layers reach every token. All heads have the same offsets, so the question sees far keys in every head.
    """
    rates = (1, 16, SEGMENT)
    offsets = tuple((rate - 1,) * HEADS for rate in rates)
    return Dilated((SEGMENT, MIDDLE, max(tokens, MIDDLE)), rates, offsets)


def config(pattern: Dilated | Window | None) -> LongNetConfig:
    """Return a configuration without positions. `pattern`: None for dense attention.

    The answer depends on which tokens occur, not where, and a sequence may be longer than those in training.
    """
    return LongNetConfig(
        vocab_size=VALUES + 1 + FILLERS,
        embed_dim=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        pattern=pattern,
        positions=None,
    )


def window_of_equal_cost(tokens: int) -> int:
    """Return the tokens of the shortest window with at least as many score entries as `pattern`."""
    least = dilated_entries(tokens)
    return next((window for window in range(1, tokens) if window_entries(tokens, window) >= least), tokens)


def dilated_entries(tokens: int) -> float:
    """Return how many scores one head computes in a causal call with `pattern(tokens)`."""
    return pattern(tokens).flops(tokens, HEADS, 1, is_causal=True) / 4 / HEADS


def window_entries(tokens: int, window: int) -> int:
    """Return how many scores one head computes in a causal window of `window` tokens, the query's own included."""
    return window * tokens - window * (window - 1) // 2


def window_reach(window: int) -> int:
    """Return how many tokens back the last token reaches through all layers."""
    return LAYERS * (window - 1)


def models(tokens: int, seed: int, device: torch.device) -> dict[str, LongNetLM]:
    """Return two models with the same weights: "dilated", and "window" with a local window of equal cost."""
    found = {}
    for name, chosen in (("dilated", pattern(tokens)), ("window", Window(window_of_equal_cost(tokens) - 1))):
        torch.manual_seed(seed)
        found[name] = LongNetLM(config(chosen)).to(device)
    return found


def draw(
    count: int, tokens: int, generator: torch.Generator, distances: range | None = None
) -> tuple[Int[Tensor, "count tokens"], Int[Tensor, " count"]]:
    """Draw sequences of fillers with one fact, then the question as the last token. The answer is the fact's token id.

    distances: those allowed between fact and question, in tokens; None: any.
    """
    sequences = torch.randint(VALUES + 1, VALUES + 1 + FILLERS, (count, tokens), generator=generator)
    answers = torch.randint(VALUES, (count,), generator=generator)
    places = range(1, tokens) if distances is None else distances
    away = torch.randint(places.start, places.stop, (count,), generator=generator)
    sequences[torch.arange(count), tokens - 1 - away] = answers
    sequences[:, -1] = VALUES
    return sequences, answers


def answer(model: LongNetLM, sequences: Int[Tensor, "count tokens"]) -> Float[Tensor, "count vocab"]:
    (states,) = model.hidden(model.embed(sequences), is_causal=True)
    return model.logits(states[:, -1])


@dataclass(frozen=True, slots=True)
class Lesson:
    """Describe a step of the curriculum. step: its number in its stage. accuracy: the running mean in this stage."""

    tokens: int
    step: int
    accuracy: float


def learn(
    model: LongNetLM, tokens: int, generator: torch.Generator, most: Mapping[int, int], *, until: float = 0.98
) -> Iterator[Lesson]:
    """Train on the stages of the curriculum of at most `tokens` tokens, and yield after each step.

    Args:
        most: the most steps of each stage, by its number of tokens. until: the accuracy above which a stage ends early.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    done = 0
    for length, count in CURRICULUM:
        if length > tokens:
            return
        running = 0.0
        for step in range(1, most[length] + 1):
            done += 1
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1.0, done / 20) * (1.0 if length < MIDDLE else 0.3)
            sequences, answers = (x.to(device) for x in draw(count, length, generator))
            logits = answer(model, sequences)
            F.cross_entropy(logits, answers).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            running = 0.9 * running + 0.1 * _right(logits, answers)
            yield Lesson(length, step, running)
            if running > until:
                break


@torch.no_grad()
def accuracy(
    model: LongNetLM, tokens: int, generator: torch.Generator, count: int, distances: range | None = None
) -> float:
    """Return the share of right answers to `count` questions, one sequence at a time. distances: as in `draw`."""
    device = next(model.parameters()).device
    pairs = [[x.to(device) for x in draw(1, tokens, generator, distances)] for _ in range(count)]
    return math.fsum(_right(answer(model, sequence), answers) for sequence, answers in pairs) / count


def step(model: LongNetLM, sequences: Tensor, answers: Tensor) -> None:
    """Run a forward and backward without an update, to be timed."""
    F.cross_entropy(answer(model, sequences), answers).backward()
    model.zero_grad()


def _right(logits: Tensor, answers: Tensor) -> float:
    return float((logits[:, :VALUES].argmax(-1) == answers).float().mean())
