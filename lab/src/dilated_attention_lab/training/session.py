"""Run one training, from its start or a checkpoint to its report."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from dilated_attention import Dilated
from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.plumbing import Facts, describe_unserved, storage, table
from dilated_attention_lab.environment import environment, peak_memory, require_device
from dilated_attention_lab.pictures import save_loss_curve, save_pattern
from dilated_attention_lab.terminal import progress
from dilated_attention_lab.training import checkpoint
from dilated_attention_lab.training.loop import OPTIONS, Recipe, Training, read_checkpoint
from dilated_attention_lab.training.text import Text, read_text, readable
from dilated_attention_lab.training.writing import write

if TYPE_CHECKING:
    from rich.console import Console

    from dilated_attention_lab.training.ranks import Ranks

PROMPT_BYTES = 128
REPORT = ("figures.jsonl", "steps.jsonl", "sample.txt", "loss.png", "pattern.png")  # and the folder model
BY_HEART = 4.0  # epochs; repeating text up to about as often is nearly as good as new text (arXiv:2305.16264)


def default_pattern(context: int, num_kv_heads: int = 16) -> Dilated:
    """Return branches of context/16, context/4 and context tokens, at rates 1, 4 and 16 or the number of KV heads if it
    is less, so that every token takes part in every branch. Below 256 tokens, return one dense segment."""
    if context < 256:
        return Dilated((context,), (1,))
    rates = tuple(min(rate, num_kv_heads) for rate in (1, 4, 16))
    return Dilated((context // 16, context // 4, context), rates)


def start(
    paths: Sequence[Path],
    out: Path,
    model: Mapping[str, Any],
    recipe: Mapping[str, Any],
    *,
    overwrite: bool = False,
    device: str = "cpu",
    backend: str = "auto",
    ranks: Ranks | None = None,
    options: Mapping[str, Any] = OPTIONS,
) -> Training:
    """Begin a run in `out`, which then holds its options and its checkpoint of step 0, and nothing of an older run.
    Raises ValueError, and writes nothing, for bad input, or if `out` holds a checkpoint or files that the report would
    replace, unless `overwrite`.

    Args:
        paths: as in `read_text`.
        model, recipe: arguments of `LongNetConfig` and `Recipe`. Without `pattern`, `default_pattern` makes it.
        options: the options to store, for `chosen_options` of a process that resumes the run.
    """
    if saved(out) and not overwrite:
        raise ValueError(f"{_checkpoint(out)} exists: give --resume to continue it, --overwrite, or another --out")
    if not overwrite and (held := [name for name in (*REPORT, "model") if (out / name).exists()]):
        raise ValueError(f"{out} holds {', '.join(held)}, but no checkpoint: give --overwrite, or another --out")
    plan = Recipe(**recipe)
    config = LongNetConfig(**model)
    if "pattern" not in model:
        config = dataclasses.replace(config, pattern=default_pattern(plan.context, config.kv_heads))
    text, usable = read_text(paths, out), _usable(device, backend)
    _agree(ranks, config, plan, text, 0)
    training = Training(config, plan, text, device=usable, backend=backend, ranks=ranks)
    first = ranks is None or ranks.first
    try:
        if first:
            remember(out, options)  # before the checkpoint: a kill between them must not leave it an older run's
        save(training, out)
        if first:
            for name in REPORT:
                (out / name).unlink(missing_ok=True)
            shutil.rmtree(out / "model", ignore_errors=True)
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror})") from error
    return training


def _checkpoint(out: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return out / "checkpoint"


def saved(out: Path) -> bool:
    """Return whether there is a checkpoint, whole or damaged."""
    return bool(checkpoint.steps(_checkpoint(out)))


def saved_model(out: Path, backend: str = "auto") -> LongNetLM:
    """Return the model of the run's newest whole checkpoint, in evaluation mode."""
    stored, about = read_checkpoint(_checkpoint(out))
    try:
        model = LongNetLM.empty(about.config, backend=backend)
        shapes = {f"model.{name}": tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        stored.require(shapes, prefix="model.")  # before there is memory for them
        model.to_empty(device="cpu")
    except RuntimeError as error:
        raise ValueError(f"{stored.path / checkpoint.INDEX}: {str(error).splitlines()[0]}") from error
    weights = {f"model.{name}": checkpoint.Piece.whole(tensor) for name, tensor in model.state_dict().items()}
    stored.read(weights, prefix="model.")
    return model.eval()


def load_model(folder: Path, device: torch.device, backend: str = "auto") -> LongNetLM:
    """Load the byte-level model in a folder of `save_pretrained` or of a run of `train`.

    A run gives its newest checkpoint's model, as `model/` may be older; without a checkpoint the one in `model/`.
    Raises ValueError if there is no model.
    """
    place = folder if (folder / "config.json").exists() else folder / "model"
    if place != folder and saved(folder):
        model = saved_model(folder, backend)
    elif (place / "config.json").exists():
        model = LongNetLM.from_pretrained(place, backend=backend)
    else:
        raise ValueError(f"{folder}: neither a model nor a run of `train` (no config.json, no checkpoint)")
    if model.config.vocab_size != 256:
        raise ValueError(
            f"{folder}: the model has vocab_size={model.config.vocab_size}; text is written by one of bytes, 256"
        )
    return model.to(device)


def save(training: Training, out: Path, *, keep: int = OPTIONS["keep"]) -> Path:
    """Write a checkpoint of the run and return its path. Delete all earlier ones except the newest `keep`."""
    return training.save(_checkpoint(out), keep=keep)


def resume(
    paths: Sequence[Path],
    out: Path,
    model: Mapping[str, Any],
    recipe: Mapping[str, Any],
    *,
    device: str = "cpu",
    backend: str = "auto",
    ranks: Ranks | None = None,
) -> Training:
    """Continue the run in `out` with its own configuration, recipe and text. The number of ranks may differ.

    `model` and `recipe` hold only the arguments of `LongNetConfig` and `Recipe` that were given; empty `paths` read the
    run's own. What is given must agree, except that `steps` may be larger: the learning rate then follows the schedule
    of the larger number.
    """
    stored, about = read_checkpoint(_checkpoint(out), ranks)
    longer = Recipe(**{**dataclasses.asdict(about.recipe), "steps": recipe.get("steps", about.recipe.steps)})
    for mine, given in ((about.config, model), (about.recipe, recipe)):
        for name, value in given.items():
            if getattr(mine, name) != value and not (name == "steps" and value > about.recipe.steps):
                raise ValueError(
                    f"{stored.path}: a checkpoint with {name}={getattr(mine, name)!r}, not {value!r}; leave that "
                    f"option out to continue it, {'or give more steps' if name == 'steps' else 'or give another --out'}"
                )
    text = read_text(paths or about.paths, out)
    usable = _usable(device, backend)
    _agree(ranks, about.config, longer, text, len(about.losses))
    training = Training(about.config, about.recipe, text, device=usable, backend=backend, ranks=ranks)
    training.load(stored, about)
    training.recipe = longer
    return training


def _agree(ranks: Ranks | None, config: LongNetConfig, recipe: Recipe, text: Text, finished_steps: int) -> None:
    """Raise ValueError on every rank unless all train the same model by the same recipe on the same text, and resume
    after the same number of steps. Without `ranks`, do nothing."""
    if ranks is not None:
        fields = dataclasses.asdict(config) | dataclasses.asdict(recipe)
        ranks.watch.agree({"text": f"sha256 {text.digest[:16]}", **fields, "finished_steps": finished_steps})


def chosen_options(out: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options named in `OPTIONS`: each as `given`; if that is None, as the run in `out` has stored it, else
    its default. `out` is None for a new run."""
    before: dict[str, Any] = {}
    if out is not None and (path := out / "options.json").exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            wanted = {name: type(default) for name, default in OPTIONS.items()}
            if not isinstance(before, dict) or any(type(before.get(name)) is not kind for name, kind in wanted.items()):
                integers, words = ([name for name in wanted if wanted[name] is kind] for kind in (int, str))
                raise ValueError(f"expected integers for {', '.join(integers)}, and words for {', '.join(words)}")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}; remove it to resume with the options' defaults") from error
    return {**OPTIONS, **before, **{name: value for name in OPTIONS if (value := given[name]) is not None}}


def remember(out: Path, options: Mapping[str, Any]) -> None:
    """Keep the options for `chosen_options` of a later process."""
    storage.write_text(out / "options.json", json.dumps(options, indent=2) + "\n")


def _usable(device: str, backend: str) -> torch.device:
    usable = require_device(device)
    table.choose(backend, Facts(usable, torch.float32))
    return usable


def run(
    training: Training, out: Path, console: Console, options: Mapping[str, Any], received: Sequence[int] | None = None
) -> int:
    """Train to the end, then report. Returns the exit code: 0, or 128 + n after signal n, with the progress saved.

    Raises FloatingPointError if a loss, or the result on held-out text, is not finite.

    Args:
        options: as `chosen_options` returns them.
        received: the list of an enclosing `noted_signals`; None to note signals here.
    """
    console.print(forecast(training), soft_wrap=True)
    with noted_signals() if received is None else nullcontext(received) as received:
        for step in _steps(training, console):
            number = received[0] if received else 0
            if training.ranks is not None:  # a signal may reach some ranks earlier than others
                number = training.ranks.greatest(number)
                training.ranks.watch.place = f"after step {step}"
            if number or step % options["save_every"] == 0 or step == training.recipe.steps:
                path = save(training, out, keep=options["keep"])
            if number:
                stopped = f"stopped after step {step} of {training.recipe.steps}; --resume continues from {path}"
                console.print(stopped, soft_wrap=True)
                return 128 + number
    _report(training, out, console, options["held_out"], options["sample"])
    return 0


def forecast(training: Training) -> str:
    """Return a text that says what is about to be trained, and how often it will read its training text."""
    recipe, split = training.recipe, training.split
    text = int((split.choices + recipe.context).sum())
    epochs = recipe.steps * recipe.batch_size * recipe.context / text
    shown = f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"
    line = (
        f"{sum(parameter.numel() for parameter in training.model.parameters()):,} parameters; "
        f"{text:,} bytes of text to learn from; "
        f"{recipe.steps:,} steps of {recipe.batch_size * recipe.context:,} bytes: {shown} epochs"
    )
    if epochs >= BY_HEART:
        line += f"\n{shown} epochs of this text: it will be learned by heart; give more text or fewer --steps"
    pattern = training.config.pattern
    if pattern is not None:
        line = "\n".join([line, *describe_unserved(pattern.branches(training.config.kv_heads))])
    return line


def _report(training: Training, out: Path, console: Console, held_out_windows: int, sample_bytes: int) -> None:
    begin = time.perf_counter()
    with console.status("measuring on held-out text"):
        bits = training.held_out_bits_per_byte(held_out_windows)
    if not math.isfinite(bits):
        raise FloatingPointError(
            f"step {training.finished_steps}: held-out text takes {bits} bits per byte; try a lower --lr"
        )
    model = training.model
    if training.ranks is not None:
        gathered = training.ranks.gather(model)
        if gathered is None:
            return
        model = gathered
    row = {
        "name": "train",
        "attention": "dense" if training.config.pattern is None else "dilated",
        "tokens_per_second": _quantiles(training),
        "peak_memory_bytes": peak_memory(training.device),
        "held_out_bits_per_byte": bits,
        "held_out_bytes": training.recipe.context * min(held_out_windows, len(training.split.held_out)),
        "held_out_seconds": time.perf_counter() - begin,
        "train_seconds": sum(training.seconds),
        "config": dataclasses.asdict(training.config),
        "recipe": dataclasses.asdict(training.recipe),
        "text_sha256": training.digest,
        "ranks": {} if training.ranks is None else training.ranks.sizes,
        "environment": environment(training.device),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    figures = out / "figures.jsonl"
    before = figures.read_text(encoding="utf-8") if figures.exists() else ""
    storage.write_text(figures, before + json.dumps(row) + "\n")
    steps = zip(training.losses, training.seconds, strict=True)
    storage.write_text(
        out / "steps.jsonl",
        "".join(
            json.dumps({"step": step, "bits_per_byte": loss / math.log(2), "seconds": seconds}) + "\n"
            for step, (loss, seconds) in enumerate(steps, 1)
        ),
    )
    model.save_pretrained(out / "model")
    name = str(row["attention"])
    save_loss_curve(out / "loss.png", name, training.losses, bits)
    context = training.recipe.context
    pattern = training.config.pattern or Dilated((context,), (1,))
    assert isinstance(pattern, Dilated)  # the command makes no other
    save_pattern(out / "pattern.png", name, pattern, context, training.config.kv_heads)
    console.print(f"held-out text: {bits:.3f} bits per byte (8 = knowing nothing)")
    if sample_bytes:
        with console.status("writing a sample"):
            sample = write_sample(training, model, sample_bytes)
        storage.write_text(out / "sample.txt", sample)
        console.rule("sample: held-out text, continued by the model after the bar", style="dim")
        console.print(sample, soft_wrap=True)
        console.rule(style="dim")
    written = f"saved in {out}: model/, checkpoint/, figures.jsonl, steps.jsonl, loss.png, pattern.png"
    console.print(written, soft_wrap=True)


def write_sample(training: Training, model: LongNetLM, length: int) -> str:
    """Return as text a prompt from the held-out part of `training`, a bar, and `length` bytes that `model` samples."""
    prompt = bytes(training.split.held_out[len(training.split.held_out) // 2, :PROMPT_BYTES].tolist())
    sample = "".join(write(model, prompt, length, seed=training.recipe.seed, temperature=0.8))
    return f"{readable(prompt.decode('utf-8', errors='replace'))}▌{sample}\n"


def _quantiles(training: Training) -> dict[str, float]:
    """Return p10, median and p90 of the steps' tokens/s, without the first step, which allocates and plans, unless it
    is the only one."""
    tokens = training.recipe.batch_size * training.recipe.context
    rates = sorted(tokens / seconds for seconds in training.seconds[1:] or training.seconds)
    last = len(rates) - 1
    return {"p10": rates[round(0.1 * last)], "median": statistics.median(rates), "p90": rates[round(0.9 * last)]}


def _steps(training: Training, console: Console) -> Iterator[int]:
    """Run the remaining steps, and yield the number of each when it is done."""
    recipe, tokens = training.recipe, training.recipe.batch_size * training.recipe.context
    with progress(console, "training", recipe.steps - training.finished_steps) as advance:
        while training.finished_steps < recipe.steps:
            training.step()
            loss = statistics.fmean(training.losses[-10:]) / math.log(2)
            rate = f"{tokens / training.seconds[-1]:,.0f} tokens/s"
            advance(1, f"step {training.finished_steps}/{recipe.steps} · {loss:.3f} bits/byte · {rate}")
            yield training.finished_steps


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Note SIGINT and SIGTERM in the yielded list, so that the current step can end. A second one kills as usual."""
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, before[number])

    before: dict[int, Any] = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
