"""LongNet language models."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dilated_attention.errors import UnsupportedError
from dilated_attention.nn import TransformerBlock, rotary_tables
from dilated_attention.parallel.sharding import cp_mean, mesh_size, sequence_range, shard_sequence
from dilated_attention.patterns import Dilated
from dilated_attention.storage import read_tensors, require_same, write_tensors, write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class LongNetConfig:
    """Shape of a `LongNetLM`.

    vocab_size: number of token ids; 256 for bytes.
    num_kv_heads: heads of k and v (grouped queries); None = num_heads.
    mlp_dim: width inside the MLP; None = 4 embed_dim.
    pattern: which tokens attend to which; None = dense attention.
    rope_base: wavelengths of the rotary positions run from 2 pi to 2 pi rope_base tokens.
    """

    vocab_size: int = 256
    embed_dim: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int | None = None
    mlp_dim: int | None = None
    pattern: Dilated | None = field(default=Dilated((512, 2048, 8192), (1, 4, 16)))
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "mlp_dim"):
            value = getattr(self, name)
            if value is None and name in ("num_kv_heads", "mlp_dim"):
                continue
            if type(value) is not int or value <= 0:
                raise ValueError(f"{name}={value!r}: must be a positive integer")
        if self.embed_dim % (2 * self.num_heads):
            raise ValueError(
                f"embed_dim={self.embed_dim}: must be a multiple of 2 x num_heads={2 * self.num_heads}, "
                "rotary positions turn pairs of channels"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads}: must divide num_heads={self.num_heads}")
        if not (self.pattern is None or isinstance(self.pattern, Dilated)):
            raise ValueError(f"pattern={self.pattern!r}: must be a Dilated, or None for dense attention")
        if type(self.rope_base) not in (int, float) or not 1 < self.rope_base < math.inf:
            raise ValueError(f"rope_base={self.rope_base!r}: must be a number above 1")
        if self.pattern is not None:
            self.pattern.offset_table(self.kv_heads)  # a table of offsets must fit the heads

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def mlp_width(self) -> int:
        return 4 * self.embed_dim if self.mlp_dim is None else self.mlp_dim

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> LongNetConfig:
        """ValueError for text that is not JSON, for an unknown, missing or mistyped field."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"configuration: not JSON ({error})") from error
        fields = _exactly(fields, cls, "configuration")
        if fields["pattern"] is not None:
            pattern = _exactly(fields["pattern"], Dilated, "configuration: pattern")
            fields["pattern"] = Dilated(**{name: _tuples(value) for name, value in pattern.items()})
        return cls(**fields)


def _exactly(fields: Any, kind: type, where: str) -> dict[str, Any]:
    names = {entry.name for entry in dataclasses.fields(kind)}
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: expected an object with the fields {', '.join(sorted(names))}, got {fields!r}")
    for word, wrong in (("unknown", fields.keys() - names), ("missing", names - fields.keys())):
        if wrong:
            raise ValueError(f"{where}: {word} field {', '.join(sorted(wrong))}")
    return dict(fields)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


class LongNetLM(nn.Module):
    """A causal language model: embedding, pre-norm blocks with rotary positions, the embedding again as output.

    forward: tokens `(batch, seq)` integers -> logits `(batch, seq, vocab_size)`; logits at t see tokens <= t.
    With `config.pattern=None` it is the same model (same parameters, same draws) with dense attention.
    After `parallel.set_context_parallel(model, mesh)` tokens and logits are this rank's shard of a sequence.
    """

    def __init__(self, config: LongNetConfig, *, backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                config.embed_dim, config.num_heads, config.kv_heads, config.mlp_width, config.pattern, backend
            )
            for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.embed_dim)
        self.mesh: Any = None
        self.reset_parameters()

    def set_context_parallel(self, mesh: Any, transport: str = "auto", layer: str = "") -> None:
        """What `parallel.set_context_parallel` calls; use that, which reaches the attention of every block too."""
        self.mesh = mesh

    def reset_parameters(self) -> None:
        """Normal of deviation 1 / sqrt(fan in); what adds to the residual stream is divided by sqrt(2 num_layers)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds = 2 * self.config.num_layers if name.endswith(("output.weight", "mlp.2.weight")) else 1
                nn.init.normal_(parameter, std=(parameter.shape[1] * adds) ** -0.5)

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        *,
        positions: Int[Tensor, "*batch seq"] | None = None,
        seq_len: int | None = None,
    ) -> Float[Tensor, "batch seq vocab"]:
        """positions: `(seq,)` or `(batch, seq)`, the rotary position of each token; None = 0, 1, 2, ..., counted from
        the start of the whole sequence. seq_len: its length over a mesh; None: equal shards."""
        x = self.embedding(tokens)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            if self.mesh is not None:
                whole = tokens.shape[1] * mesh_size(self.mesh) if seq_len is None else seq_len
                positions = positions + sequence_range(whole, self.mesh)[0]
        exact = torch.promote_types(x.dtype, torch.float32)
        head_dim = self.config.embed_dim // self.config.num_heads
        rotary = rotary_tables(positions, head_dim, self.config.rope_base, exact)
        for block in self.blocks:
            x = block(x, rotary, is_causal=True, seq_len=seq_len)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, tokens: Int[Tensor, "batch seq_and_one"]) -> Float[Tensor, ""]:
        """Mean cross entropy in nats of tokens[:, 1:] given all before each.

        Over a mesh every rank passes the same whole tokens and gets the same mean. The gradient of each rank's shard is
        scaled so that the mean over the mesh of the ranks' gradients is that of one device (`cp_mean`).
        """
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        if self.mesh is None:
            return F.cross_entropy(self(inputs).flatten(0, 1), labels.flatten())
        shard, own = shard_sequence(inputs, self.mesh), shard_sequence(labels, self.mesh)
        logits = self(shard, seq_len=inputs.shape[1])
        total = F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
        return cp_mean(total, own.numel(), self.mesh)

    @torch.no_grad()
    def generate(
        self,
        tokens: Int[Tensor, "batch seq"],
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "batch longer"]:
        """tokens with `max_new_tokens` sampled ones appended; temperature 0 takes the likeliest.

        Each token costs a forward of the whole prefix.
        """
        if self.mesh is not None:
            raise UnsupportedError("generate runs on one device; call parallel.set_context_parallel(model, None) first")
        if tokens.shape[1] == 0:
            raise ValueError("tokens: empty prompt; give at least one token")
        if temperature < 0:
            raise ValueError(f"temperature={temperature}: must be >= 0")
        for _ in range(max_new_tokens):
            logits = self(tokens)[:, -1].float()
            if temperature == 0:
                chosen = logits.argmax(-1, keepdim=True)
            else:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat((tokens, chosen.to(tokens.dtype)), 1)
        return tokens

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `folder`/model.safetensors and `folder`/config.json, each atomically."""
        folder = Path(folder)
        write_tensors(folder / "model.safetensors", self.state_dict(), {"architecture": type(self).__name__})
        write_text(folder / "config.json", self.config.to_json())

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, backend: str = "auto") -> LongNetLM:
        """A model saved by `save_pretrained`, on the CPU, of the saved dtype.

        ValueError names what is wrong with a missing, truncated or foreign file; nothing is loaded by halves.
        """
        path = Path(folder) / "config.json"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: cannot be read ({error})") from error
        try:
            config = LongNetConfig.from_json(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        weights, metadata = read_tensors(Path(folder) / "model.safetensors")
        if metadata.get("architecture") != cls.__name__:
            raise ValueError(
                f"{folder}/model.safetensors: architecture is {metadata.get('architecture')!r}, not {cls.__name__!r}"
            )
        with torch.device("meta"):
            model = cls(config, backend=backend)
        require_same(model.state_dict(), weights, f"{folder}/model.safetensors")
        model.load_state_dict(weights, assign=True)
        return model
