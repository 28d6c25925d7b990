"""Models as a folder: config.json and model.safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from dilated_attention.models.configuration import Configuration
from dilated_attention.storage import read_tensors, require_same, write_tensors, write_text

Some = TypeVar("Some", bound="Pretrained")


class Pretrained(nn.Module):
    """A module made from one configuration. `type(self)(config, backend=...)` draws its initial weights."""

    configuration: ClassVar[type[Configuration]]
    config: Any

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `folder`/model.safetensors and `folder`/config.json, each atomically."""
        folder = Path(folder)
        write_tensors(folder / "model.safetensors", self.state_dict(), {"architecture": type(self).__name__})
        write_text(folder / "config.json", self.config.to_json())

    @classmethod
    def from_pretrained(cls: type[Some], folder: str | Path, *, backend: str = "auto") -> Some:
        """A model saved by `save_pretrained`, on the CPU, of the saved dtype.

        ValueError names what is wrong with a missing, truncated or foreign file; nothing is loaded by halves.
        """
        path = Path(folder) / "config.json"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: cannot be read ({error})") from error
        try:
            config = cls.configuration.from_json(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        weights, metadata = read_tensors(Path(folder) / "model.safetensors")
        if metadata.get("architecture") != cls.__name__:
            raise ValueError(
                f"{folder}/model.safetensors: architecture is {metadata.get('architecture')!r}, not {cls.__name__!r}"
            )
        model = cls.empty(config, backend=backend)
        require_same(model.state_dict(), weights, f"{folder}/model.safetensors")
        model.load_state_dict(weights, assign=True)
        return model

    @classmethod
    def empty(cls: type[Some], config: Any, *, backend: str = "auto") -> Some:
        """A model without storage, on the meta device, for weights to be assigned to."""
        with torch.device("meta"):
            return cls(config, backend=backend)
