"""Training steps, their state, and its checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.storage import read_tensors, require_same, write_tensors
from dilated_attention.training.text import Split, Text

FORMAT = "dilated-attention training 1"
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
    last bit, whether or not it was saved and loaded on the way.
    """

    def __init__(
        self,
        config: LongNetConfig,
        recipe: Recipe,
        text: Text,
        *,
        device: torch.device | str = "cpu",
        backend: str = "auto",
    ) -> None:
        self.config = config
        self.recipe = recipe
        self.text = text
        self.digest = text.digest
        self.split: Split = text.split(recipe.context)
        self.device = torch.device(device)
        torch.manual_seed(recipe.seed)
        self.model = LongNetLM(config, backend=backend).to(self.device)
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
        tokens = self.split.batch(self.recipe.batch_size, self.generator).to(self.device)
        loss = self.model.loss(tokens)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        value = loss.item()
        if not (math.isfinite(value) and math.isfinite(norm.item())):
            raise FloatingPointError(
                f"step {self.finished_steps + 1}: loss {value}, gradient norm {norm.item()}; try a lower --lr"
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
        """Write everything that the next step depends on to one safetensors file, atomically."""
        about = {
            "format": FORMAT,
            "config": self.config.to_json(),
            "recipe": json.dumps(dataclasses.asdict(self.recipe)),
            "text": self.digest,
            "paths": json.dumps([str(path) for path in self.text.paths]),
        }
        write_tensors(path, self._state(), about)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of the same configuration, recipe and text. Else ValueError, nothing changed."""
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
            f"optimizer.{key}.{name}": torch.empty(() if key == "step" else parameter.shape)
            for name, parameter in parameters.items()
            for key in ("step", "exp_avg", "exp_avg_sq")
        }
        history = state.get("history.losses", torch.empty(0))
        expected = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        expected |= {"rng.global": torch.get_rng_state(), "rng.batches": self.generator.get_state()}
        expected |= {"history.losses": history, "history.seconds": history}
        require_same(expected | (moments if len(history) else {}), state, str(path))
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(state[f"model.{name}"])
        if len(history):
            for name, parameter in parameters.items():
                step = state[f"optimizer.step.{name}"]
                self.optimizer.state[parameter] = {
                    "step": step.to(self.device) if self.device.type == "cuda" else step,
                    "exp_avg": state[f"optimizer.exp_avg.{name}"].to(self.device),
                    "exp_avg_sq": state[f"optimizer.exp_avg_sq.{name}"].to(self.device),
                }
        torch.set_rng_state(state["rng.global"])
        self.generator.set_state(state["rng.batches"])
        self.losses = history.tolist()
        self.seconds = state["history.seconds"].tolist()

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
            "history.losses": torch.tensor(self.losses, dtype=torch.float64),
            "history.seconds": torch.tensor(self.seconds, dtype=torch.float64),
        }


@dataclass(frozen=True, slots=True)
class About:
    """What a checkpoint says of itself. text: sha256 of the training text; paths: where it was read from."""

    config: LongNetConfig
    recipe: Recipe
    text: str
    paths: tuple[Path, ...]


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], About]:
    """ValueError when the file is missing, truncated, or no checkpoint of this format."""
    state, metadata = read_tensors(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: format is {metadata.get('format')!r}, not {FORMAT!r}: not a checkpoint of `train`")
    try:
        return state, About(
            config=LongNetConfig.from_json(metadata["config"]),
            recipe=Recipe(**json.loads(metadata["recipe"])),
            text=metadata["text"],
            paths=tuple(Path(path) for path in json.loads(metadata["paths"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged metadata ({error})") from error
