"""Training steps, their state, and its checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.storage import read_tensors, require_same, write_tensors, write_text
from dilated_attention.training.text import Split, Text

if TYPE_CHECKING:
    from dilated_attention.training.ranks import Ranks

FORMAT = "dilated-attention training 1"
HISTORY = ("losses", "seconds")
BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is trained: AdamW, linear warm-up, then a cosine down to a tenth of `learning_rate`."""

    context: int = 8192
    batch_size: int = 1
    steps: int = 1000
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("context", 2), ("batch_size", 1), ("steps", 1), ("warmup_steps", 0), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name}={value!r}: must be an integer >= {least}")
        for name in ("learning_rate", "weight_decay", "clip_norm"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"{name}={value!r}: must be a finite number >= 0")

    def rate(self, step: int) -> float:
        """Learning rate of the step with index `step`."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


class Training:
    """A model in training. On the CPU the losses are a function of (config, recipe, text, thread count) alone, to the
    last bit, whether or not it was saved and loaded on the way; with `ranks`, of their number, too.

    Args:
        ranks: the processes that share it; each calls every method, with the same arguments.
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
        self.losses: list[float] = []  # nats per byte, one a step
        self.seconds: list[float] = []

    @property
    def finished_steps(self) -> int:
        return len(self.losses)

    def step(self) -> float:
        """One optimizer step; its loss in nats per byte. FloatingPointError, nothing updated, if it is not finite."""
        begin = time.perf_counter()
        if self.ranks is not None:
            self.ranks.watch.place = f"step {self.finished_steps + 1}"
        tokens = self.split.batch(self.recipe.batch_size, self.generator).to(self.device)
        loss = self.model.loss(tokens if self.ranks is None else self.ranks.samples(tokens))
        loss.backward()
        gradient = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        value, norm = loss.item(), gradient.item()
        if self.ranks is not None:
            (value,), norm = self.ranks.mean(value), self.ranks.whole(gradient).item()
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

    @torch.no_grad()
    def held_out_bits_per_byte(self, windows: int) -> float:
        """Mean cross entropy in bits over at most `windows` held-out windows."""
        held_out = self.split.sample_held_out(windows).to(self.device)
        return sum(self.model.loss(window[None]).item() for window in held_out) / len(held_out) / math.log(2)

    def save(self, path: Path) -> None:
        """Write everything that the next step depends on, atomically: one safetensors file, or with ranks a folder.

        In the folder `latest.json` names the step whose own folder holds the shards; the one before is kept until then.
        """
        about = {
            "format": FORMAT,
            "config": self.config.to_json(),
            "recipe": json.dumps(dataclasses.asdict(self.recipe)),
            "text": self.digest,
            "paths": json.dumps([str(path) for path in self.text.paths]),
        }
        if self.ranks is None:
            history = {"losses": self.losses, "seconds": self.seconds}
            tensors = {f"history.{name}": torch.tensor(x, dtype=torch.float64) for name, x in history.items()}
            write_tensors(path, self._state() | tensors, about)
            return
        folder = f"step-{self.finished_steps}"
        self.ranks.write(self._state(), path / folder)
        if self.ranks.first:
            latest = {**about, "folder": folder, "losses": self.losses, "seconds": self.seconds}
            write_text(path / "latest.json", json.dumps(latest))
            for old in path.glob("step-*"):
                if old.name != folder:
                    shutil.rmtree(old)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of the same configuration, recipe and text. Else ValueError, nothing changed.

        Any number of ranks may have written it.
        """
        state, about = read_checkpoint(path)
        for name, mine, theirs in (
            ("model", self.config, about.config),
            ("recipe", self.recipe, about.recipe),
            ("text", self.digest, about.text),
        ):
            if mine != theirs:
                raise ValueError(f"{path}: a checkpoint of another {name}: {theirs}, not {mine}")
        parameters = dict(self.model.named_parameters())
        moments = {
            f"optimizer.{key}.{name}": torch.zeros(()) if key == "step" else torch.zeros_like(parameter)
            for name, parameter in parameters.items()
            for key in ("step", "exp_avg", "exp_avg_sq")
        }
        weights = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        expected = weights | {"rng.global": torch.get_rng_state(), "rng.batches": self.generator.get_state()}
        if about.losses:
            expected |= moments
        if about.shards is not None:
            from dilated_attention.training.ranks import read

            state = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
            read(state, about.shards)
        require_same(expected, state, str(path))
        if self.ranks is not None:
            state = {name: self.ranks.like(tensor, expected[name]) for name, tensor in state.items()}
        with torch.no_grad():
            for name, tensor in weights.items():
                tensor.copy_(state[name])
        if about.losses:
            for name, parameter in parameters.items():
                step = state[f"optimizer.step.{name}"]
                self.optimizer.state[parameter] = {
                    "step": step.to(self.device) if self.device.type == "cuda" else step,
                    "exp_avg": state[f"optimizer.exp_avg.{name}"].to(self.device),
                    "exp_avg_sq": state[f"optimizer.exp_avg_sq.{name}"].to(self.device),
                }
        torch.set_rng_state(state["rng.global"])
        self.generator.set_state(state["rng.batches"])
        self.losses, self.seconds = list(about.losses), list(about.seconds)

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


@dataclass(frozen=True, slots=True)
class About:
    """What a checkpoint says of itself.

    Attributes:
        text: sha256 of the training text; paths: where it was read from.
        losses, seconds: of every finished step.
        shards: the folder that holds the tensors where several ranks wrote them, else None.
    """

    config: LongNetConfig
    recipe: Recipe
    text: str
    paths: tuple[Path, ...]
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    shards: Path | None = None


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], About]:
    """A file's tensors, or none of a folder of shards, and what it says of itself.

    ValueError when it is missing, truncated, or no checkpoint of this format.
    """
    state: dict[str, Tensor] = {}
    about: Mapping[str, Any]
    if path.is_dir():
        try:
            about = json.loads((path / "latest.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: no whole checkpoint in this folder ({error})") from error
    else:
        state, about = read_tensors(path)
    if about.get("format") != FORMAT:
        raise ValueError(f"{path}: format is {about.get('format')!r}, not {FORMAT!r}: not a checkpoint of `train`")
    try:
        history = {name: about[name] if path.is_dir() else state.pop(f"history.{name}").tolist() for name in HISTORY}
        return state, About(
            config=LongNetConfig.from_json(about["config"]),
            recipe=Recipe(**json.loads(about["recipe"])),
            text=about["text"],
            paths=tuple(Path(path) for path in json.loads(about["paths"])),
            shards=path / about["folder"] if path.is_dir() else None,
            **{name: tuple(values) for name, values in history.items()},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged metadata ({error})") from error
