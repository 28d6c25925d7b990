"""Save and load models as a folder: config.json, model.safetensors, and the digests of both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dilated_attention.models.configuration import Configuration
from dilated_attention.plumbing import storage

Some = TypeVar("Some", bound="Pretrained")

FILES = ("model.safetensors", "config.json")


class Pretrained(nn.Module):
    """Save and load a module that is made from a single configuration.

    Base class of all models here. A subclass sets `configuration`, the class of its configuration. Its constructor,
    `subclass(config, backend=...)`, keeps the configuration as `config` and draws the initial weights.

    Examples:
        >>> import tempfile
        >>> from dilated_attention.models import LongNetConfig, LongNetLM
        >>> model, tokens = LongNetLM(LongNetConfig(embed_dim=32, num_layers=1)).eval(), torch.randint(256, (1, 10))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     again = LongNetLM.from_pretrained(folder)
        >>> torch.equal(again(tokens), model(tokens))
        True
    """

    configuration: ClassVar[type[Configuration]]
    config: Any

    def reset_parameters(self) -> None:
        """Draw all parameters as the constructor does, for example of a model that was made on the meta device."""
        for module in reversed([*self.modules()][1:]):  # a part after its own parts, whose values it replaces
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
        self._draw()

    def _draw(self) -> None:
        """Draw the parameters that the constructor draws in another way than their modules do."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `folder`/model.safetensors, config.json and SHA256SUMS, each atomically.

        Raises:
            ValueError: the weights' names or shapes differ from a new model's of this configuration, a weight is a
                DTensor, or the weights do not share one floating dtype. Nothing has then been written.
        """
        state = self.state_dict()
        try:
            storage.require_same(self.empty(self.config).state_dict(), state, type(self).__name__)
        except ValueError as error:
            raise ValueError(
                f"{error}, unlike a model of its configuration. Undo what was added (merge LoRA, remove "
                "parametrizations and torch.compile of parts), or make a model of a configuration that has it"
            ) from error
        sharded = [name for name, x in state.items() if isinstance(x, DTensor)]
        if sharded:
            raise ValueError(
                f"{type(self).__name__}: {sharded[0]} is a DTensor. Gather the weights (torch.distributed.checkpoint."
                "state_dict.get_model_state_dict with full_state_dict=True), load them into a model of the same "
                "configuration and save that"
            )
        _require_one_dtype(state, type(self).__name__)

        weights, config = (Path(folder) / name for name in FILES)
        storage.write_tensors(weights, state, {"architecture": type(self).__name__, "format": "pt"})
        storage.write_text(config, self.config.to_json())
        storage.write_digests(Path(folder), {path.name: storage.digest(path) for path in (weights, config)})

    @classmethod
    def from_pretrained(cls: type[Some], folder: str | Path, *, backend: str = "auto") -> Some:
        """Load a model that `save_pretrained` wrote: on the CPU, in the saved dtype, in evaluation mode.

        Without SHA256SUMS in the folder, digests are not checked.

        Raises:
            ValueError: a file is missing, damaged or not of this library; the message says which. No model is loaded
                partially.
        """
        weights_path, config_path = (Path(folder) / name for name in FILES)
        if (Path(folder) / storage.SUMS).exists():
            try:
                digests = storage.read_digests(Path(folder))
                for path in (config_path, weights_path):
                    storage.require_whole(path, digests)
            except ValueError as error:
                raise ValueError(f"{error}; if that was meant, delete {storage.SUMS}") from error

        text = storage.read_bytes(config_path)
        try:
            config = cls.configuration.from_json(text.decode())
        except ValueError as error:
            raise ValueError(f"{config_path}: {error}") from error

        weights, metadata = storage.read_tensors(weights_path)
        if metadata.get("architecture") != cls.__name__:
            raise ValueError(f"{weights_path}: architecture is {metadata.get('architecture')!r}, not {cls.__name__!r}")
        try:
            model = cls.empty(config, backend=backend)
        except (ValueError, RuntimeError) as error:  # sizes whose product is no size
            raise ValueError(f"{config_path}: {str(error).splitlines()[0]}") from error
        storage.require_same(model.state_dict(), weights, str(weights_path))
        _require_one_dtype(weights, str(weights_path))
        model.load_state_dict(weights, assign=True)
        return model.eval()

    @classmethod
    def empty(cls: type[Some], config: Any, *, backend: str = "auto") -> Some:
        """Return a model without storage, on the meta device, ready for weights to be assigned."""
        with torch.device("meta"):
            return cls(config, backend=backend)


def _require_one_dtype(weights: Mapping[str, Tensor], where: str) -> None:
    dtypes = {x.dtype for x in weights.values()}
    if len(dtypes) != 1 or not all(dtype.is_floating_point for dtype in dtypes):
        got = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"{where}: weights must share one floating dtype; got {got}: save it after model.to(dtype)")
