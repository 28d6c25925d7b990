"""Run training steps, and save and load their state."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention_lab.environment import memory
from dilated_attention_lab.training import checkpoint
from dilated_attention_lab.training.checkpoint import Checkpoint, Piece
from dilated_attention_lab.training.text import Split, Text

if TYPE_CHECKING:
    from dilated_attention_lab.training.ranks import Ranks

BETAS = (0.9, 0.95)
DTYPES = ("float32", "bfloat16")
OPTIONS: dict[str, Any] = {  # of `train`, kept beside the checkpoint
    "save_every": 100,  # steps between checkpoints
    "keep": 2,  # older checkpoints to keep
    "held_out": 16,  # the most windows of held-out text to measure on at the end
    "sample": 256,  # bytes of sample text to write at the end
    "backend": "auto",
    "device": "cpu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Say how a model is trained: AdamW, linear warm-up, then a cosine down to a tenth of `learning_rate`.

    `dtype` is the dtype of matrix products and attention; with "bfloat16" they run under autocast. Weights, moments and
    sums are float32.
    """

    context: int = 8192
    batch_size: int = 1
    steps: int = 1000
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, least in (("context", 2), ("batch_size", 1), ("steps", 1), ("warmup_steps", 0), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name}={value!r}: must be an integer >= {least}")
        if self.seed >= 1 << 64:
            raise ValueError(f"seed={self.seed}: must be below 2^64, as PyTorch's generators take it")
        for name in ("learning_rate", "weight_decay", "clip_norm"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"{name}={value!r}: must be a finite number >= 0")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: must be {' or '.join(DTYPES)}")

    def rate(self, step: int) -> float:
        """Return the learning rate of the step with index `step`."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


class Training:
    """Train a model. On the CPU the losses depend on (config, recipe, text, thread count) alone, to the last bit, even
    if the training is saved and loaded on the way; with `ranks`, also on their number.

    Args:
        ranks: the processes that share the training; each calls every method, with the same arguments.
    """

    def __init__(
        self,
        config: LongNetConfig,
        recipe: Recipe,
        text: Text,
        *,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        ranks: Ranks | None = None,
    ) -> None:
        if ranks is not None and recipe.batch_size % ranks.data:
            raise ValueError(
                f"batch_size={recipe.batch_size}: must be a multiple of the {ranks.data} ranks that share the samples "
                "(processes / --context-parallel)"
            )
        self.ranks = ranks
        self.config = config
        self.recipe = recipe
        self.text = text
        self.digest = text.digest
        self.split: Split = text.split(recipe.context)
        self.device = torch.device(device)
        _require_memory(config, self.device, 1 if ranks is None else ranks.size)
        torch.manual_seed(recipe.seed)
        self.model = LongNetLM(config, backend=backend).to(self.device)
        if ranks is not None:
            ranks.distribute(self.model)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=recipe.learning_rate,
            betas=BETAS,
            fused=self.device.type in ("cpu", "cuda"),
        )
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.losses: list[float] = []  # nats per byte, one per step
        self.seconds: list[float] = []

    @property
    def finished_steps(self) -> int:
        return len(self.losses)

    def step(self) -> float:
        """Run an optimizer step, and return its loss in nats per byte.

        Raises FloatingPointError, and updates nothing, if the loss or the gradient is not finite.
        """
        begin = time.perf_counter()
        if self.ranks is not None:
            self.ranks.watch.place = f"step {self.finished_steps + 1}"
        tokens = self.split.batch(self.recipe.batch_size, self.generator).to(self.device)
        loss = self._loss(tokens if self.ranks is None else self.ranks.samples(tokens))
        loss.backward()
        gradient = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        value, norm = loss.item(), gradient.item()
        if self.ranks is not None:
            value, norm = self.ranks.mean(value), self.ranks.whole(gradient).item()
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise FloatingPointError(
                f"step {self.finished_steps + 1}: loss {value}, gradient norm {norm}; try a lower --lr"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.finished_steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(value)
        self.seconds.append(time.perf_counter() - begin)
        return value

    def _loss(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.dtype == "bfloat16"):
            return self.model.loss(tokens)

    @torch.no_grad()
    def held_out_bits_per_byte(self, windows: int) -> float:
        """Return the mean cross entropy in bits over at most `windows` held-out windows, without dropout."""
        held_out = self.split.sample_held_out(windows).to(self.device)
        mode = self.model.training
        self.model.eval()
        try:
            return sum(self._loss(window[None]).item() for window in held_out) / len(held_out) / math.log(2)
        finally:
            self.model.train(mode)

    def save(self, folder: Path, *, keep: int = 2) -> Path:
        """Write everything that the next step depends on as a checkpoint in `folder`, and return its path.

        Deletes all earlier checkpoints except the newest `keep`. Raises OSError if it cannot be written; the earlier
        ones then stay.
        """
        about = {
            "config": json.loads(self.config.to_json()),
            "recipe": dataclasses.asdict(self.recipe),
            "text": self.digest,
            "paths": [str(path) for path in self.text.paths],
            "losses": self.losses,
            "seconds": self.seconds,
        }
        peers = self.ranks or checkpoint.Alone()
        return checkpoint.write(folder, self.finished_steps, self._pieces(self._state()), about, keep=keep, peers=peers)

    def load(self, stored: Checkpoint, about: About) -> None:
        """Continue from a checkpoint of the same configuration, recipe and text, written by any number of ranks.

        Raises ValueError for any other checkpoint, and changes nothing.
        """
        for name, mine, theirs in (
            ("model", self.config, about.config),
            ("recipe", self.recipe, about.recipe),
            ("text", self.digest, about.text),
        ):
            if mine != theirs:
                raise ValueError(f"{stored.path}: a checkpoint of another {name}: {theirs}, not {mine}")
        parameters = dict(self.model.named_parameters())
        weights = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        expected = weights | {"rng.global": torch.get_rng_state(), "rng.batches": self.generator.get_state()}
        if about.losses:
            expected |= {
                f"optimizer.{key}.{name}": torch.zeros(()) if key == "step" else parameter
                for name, parameter in parameters.items()
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
        with torch.no_grad():
            state = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
            stored.read(self._pieces(state))
            try:
                for name in ("rng.global", "rng.batches"):
                    torch.Generator().set_state(state[name])
            except RuntimeError as error:
                raise ValueError(f"{stored.path}: {name} is no state of a generator ({error})") from error
            for name, tensor in weights.items():
                tensor.copy_(state[name])
        if about.losses:
            for name, parameter in parameters.items():
                step = state[f"optimizer.step.{name}"]
                self.optimizer.state[parameter] = {
                    "step": step.to(self.device) if self.device.type == "cuda" else step,
                    "exp_avg": state[f"optimizer.exp_avg.{name}"],
                    "exp_avg_sq": state[f"optimizer.exp_avg_sq.{name}"],
                }
        torch.set_rng_state(state["rng.global"])
        self.generator.set_state(state["rng.batches"])
        self.losses, self.seconds = list(about.losses), list(about.seconds)

    def _pieces(self, state: Mapping[str, Tensor]) -> dict[str, Piece]:
        piece = Piece.whole if self.ranks is None else self.ranks.piece
        return {name: piece(tensor) for name, tensor in state.items()}

    def _state(self) -> dict[str, Tensor]:
        parameters = dict(self.model.named_parameters())
        return {
            **{f"model.{name}": tensor for name, tensor in self.model.state_dict().items()},
            **{
                f"optimizer.{key}.{name}": tensor
                for name, parameter in parameters.items()
                for key, tensor in self.optimizer.state.get(parameter, {}).items()
            },
            "rng.global": torch.get_rng_state(),
            "rng.batches": self.generator.get_state(),
        }


def _require_memory(config: LongNetConfig, device: torch.device, ranks: int) -> None:
    """Raise ValueError if the whole weights and one rank's share of gradients and moments exceed the memory."""
    count = sum(parameter.numel() for parameter in LongNetLM.empty(config).parameters())
    needed, there = count * (4 + 12 // ranks), memory(device)
    if there is not None and needed > there:
        raise ValueError(
            f"embed_dim={config.embed_dim}, num_layers={config.num_layers}: {count:,} parameters need {needed:,} bytes "
            f"to train, and {device} has {there:,}; make the model smaller"
        )


@dataclass(frozen=True, slots=True)
class About:
    """Hold what a checkpoint says about itself.

    Attributes:
        text: sha256 of the training text; paths: where it was read from.
        losses, seconds: of every finished step.
    """

    config: LongNetConfig
    recipe: Recipe
    text: str
    paths: tuple[Path, ...]
    losses: tuple[float, ...]
    seconds: tuple[float, ...]


def read_checkpoint(folder: Path, ranks: Ranks | None = None) -> tuple[Checkpoint, About]:
    """Return the newest whole checkpoint in a folder, and what it says about itself.

    Warns of newer ones that are damaged. Raises ValueError if none is whole, or if it is not of this format.
    """
    stored = checkpoint.newest(folder, ranks or checkpoint.Alone())
    try:
        about = _about(stored.about)
        if stored.path.name != f"step-{len(about.losses)}":
            raise ValueError(f"losses: {len(about.losses)} of them")
        return stored, about
    except (KeyError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{stored.path / checkpoint.INDEX}: {reason}") from error


def _about(fields: Mapping[str, Any]) -> About:
    for name in ("losses", "seconds"):
        if not isinstance(fields[name], list) or not all(type(value) is float for value in fields[name]):
            raise ValueError(f"{name}: must be a list of floats")
    if len(fields["losses"]) != len(fields["seconds"]):
        raise ValueError(f"losses: {len(fields['losses'])} of them, but {len(fields['seconds'])} seconds")
    for name, kind in (("text", str), ("recipe", dict), ("paths", list)):
        if not isinstance(fields[name], kind):
            raise ValueError(f"{name}={fields[name]!r}: must be of type {kind.__name__}")
    return About(
        config=LongNetConfig.from_json(json.dumps(fields["config"])),
        recipe=Recipe(**fields["recipe"]),
        text=fields["text"],
        paths=tuple(Path(path) for path in fields["paths"]),
        losses=tuple(fields["losses"]),
        seconds=tuple(fields["seconds"]),
    )
