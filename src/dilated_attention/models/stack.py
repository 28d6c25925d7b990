"""Provide the parts that all LongNets share: an embedding, blocks, a final norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilated_attention import UnsupportedError
from dilated_attention.models.configuration import LongNetConfig
from dilated_attention.models.generation import KeyValueCache, SelectionMemory
from dilated_attention.models.packing import (
    checked_lengths,
    cumulative,
    packed_counts,
    packs,
    padded,
    require_tokens,
    within,
)
from dilated_attention.models.pretrained import Pretrained
from dilated_attention.nn import TransformerBlock
from dilated_attention.parallel import sequence_range
from dilated_attention.plumbing import ShardDropout, Sharded, Tables, agreed_seed, dtype_of_products, mesh_size


def attention_options(config: LongNetConfig, backend: str) -> dict[str, Any]:
    """Return the arguments that a `SelfAttention` and a `TransformerBlock` of a LongNet share."""
    return {
        "embed_dim": config.embed_dim,
        "num_heads": config.num_heads,
        "num_kv_heads": config.kv_heads,
        "pattern": config.attention_pattern,
        "backend": backend,
        "bias": config.bias,
        "sub_ln": config.sub_ln,
        "norm_eps": config.norm_eps,
    }


@torch.no_grad()
def _draw_parts(weight: Tensor, rows: Sequence[int], gains: Sequence[float]) -> None:
    """Draw each run of rows of a weight as a matrix of its own, Xavier normal with its gain."""
    parts = weight.split(list(rows))
    for part, gain in zip(parts, gains, strict=True):
        nn.init.xavier_normal_(part, gain)
    weight.copy_(torch.cat(parts))  # under FSDP2 parts are copies


class SelectedAttention(nn.Module):
    """Give an attention module that selects its keys the interface of `SelfAttention`. It is causal."""

    def __init__(self, config: LongNetConfig, backend: str) -> None:
        super().__init__()
        assert config.selection is not None
        self.selected = config.selection.module(
            config.embed_dim, config.num_heads, config.kv_heads, bias=config.bias, backend=backend
        )

    def forward(
        self,
        x: Float[Tensor, "batch seq embed_dim"],
        rotary: Tables | None = None,
        is_causal: bool = False,
        *,
        cu_seqlens: Int[Tensor, " samples_and_one"] | None = None,
        seq_len: int | None = None,
        memory: SelectionMemory | None = None,
        first_only: bool = False,
    ) -> Float[Tensor, "batch seq embed_dim"]:
        """Return the attention's output, shaped like x. Arguments as in `SelfAttention`; is_causal must be true and
        first_only false."""
        assert is_causal
        assert not first_only
        if memory is not None:
            return memory(x, rotary, self.selected)
        if self.selected.mesh is not None:
            self.selected.seq_len = seq_len
        return self.selected(x, rotary, cu_seqlens=cu_seqlens)


Places = tuple[Tensor, Tensor]
"""(positions, origins): the position of every token, and the middle of its sample, from which xPos counts."""


class Positioned(Sharded, Pretrained):
    """Base class of LongNets and of their attention: a configuration, and the positions of tokens, also of a shard's.

    Methods take x `(batch, seq, ...)`, over a mesh this rank's shard, and `seq_len`, the length of the whole sequence.
    """

    configuration = LongNetConfig
    config: LongNetConfig

    def _whole_length(self, x: Tensor, seq_len: int | None) -> int:
        """Return the length of the whole sequence: over a mesh `seq_len`, or if it is None, equal shards together."""
        if self.mesh is None:
            return x.shape[1]
        if seq_len is None:
            seq_len = self.seq_len
        if seq_len is None:
            return x.shape[1] * mesh_size(self.mesh)
        return seq_len

    def _first_token(self, seq_len: int | None) -> int:
        """Return the position of this rank's first token; 0 without a mesh."""
        if self.mesh is None:
            return 0
        assert seq_len is not None
        return sequence_range(seq_len, self.mesh)[0]

    def _places(
        self, x: Tensor, seq_len: int | None, positions: Tensor | None = None, counts: list[int] | None = None
    ) -> Places | None:
        """Return positions `(batch or 1, seq)` and origins `(batch or 1, 1)`; None in a model without positions.

        An origin is the position from which xPos counts, the middle of the sample. positions: `(seq,)` or `(batch,
        seq)`; None: 0, 1, 2, ... counts: tokens of each sample; None: all of x.
        """
        rotary = self.config.rotary
        batch, seq, _ = x.shape
        if rotary is None:
            return None
        if self.mesh is not None and positions is not None and rotary.scale_base is not None:
            raise UnsupportedError(
                "positions with a mesh and xPos is not supported, since the ranks would need the middle of all "
                "positions; leave positions out, which count from the sequence's start"
            )

        if positions is None:
            start = self._first_token(seq_len)
            whole = self._whole_length(x, seq_len)
            rotary.check((whole + 1) // 2, dtype_of_products(x))
            if counts is None:
                origins = torch.full((1, 1), whole // 2, device=x.device)
            else:
                origins = torch.tensor([count // 2 for count in counts], device=x.device)[:, None]
            return torch.arange(start, start + seq, device=x.device)[None], origins

        if positions.shape not in ((seq,), (batch, seq)):
            raise ValueError(
                f"positions must have shape (seq,) = ({seq},) or (batch, seq); got {tuple(positions.shape)}"
            )
        if not positions.is_floating_point():
            positions = positions.long()
        positions = torch.atleast_2d(positions)
        if rotary.scale_base is None or not positions.numel():
            return positions, positions[:, :1]
        if counts is not None:  # padding may hold anything: it gets its sample's first position
            positions = torch.where(within(counts, seq, x.device), positions, positions[:, :1])
        origins = (positions.amin(-1, keepdim=True) + positions.amax(-1, keepdim=True)) // 2
        if not torch.compiler.is_compiling():
            rotary.check(int((positions - origins).abs().max()), dtype_of_products(x))
        return positions, origins

    def _packed_places(
        self, x: Tensor, positions: Tensor | None, counts: list[int], seq_len: int | None
    ) -> Places | None:
        """Return each token's position in its packed sample, and the origin of xPos, both `(tokens,)`.

        The origin is the middle of the token's sample. Returns None in a model without positions. Raises
        UnsupportedError if `positions` are given. counts (tokens of each sample) are global over a mesh.
        """
        rotary = self.config.rotary
        if rotary is None:
            return None
        if positions is not None:
            raise UnsupportedError(
                "positions with cu_seqlens is not supported; leave positions out: each sample's count from 0"
            )
        rotary.check((max(counts, default=0) + 1) // 2, dtype_of_products(x))
        start = self._first_token(seq_len)
        tokens = torch.arange(start, start + x.shape[1], device=x.device)
        edges = cumulative(counts, x.device)
        sample = torch.searchsorted(edges, tokens, right=True) - 1
        return tokens - edges[sample], edges.diff()[sample] // 2

    def _tables(self, x: Tensor, places: Places | None) -> Tables | None:
        """Return the tables that rotate queries and keys computed from x; None without places."""
        if places is None or self.config.rotary is None:
            return None
        return self.config.rotary.tables(*places, torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True, eq=False)
class _Asked:
    """Hold the options of one run of the layers; see `LongNetStack.hidden`."""

    is_causal: bool
    seq_len: int | None
    cache: KeyValueCache | None
    all_layers: bool
    first_only: bool


class LongNetStack(Positioned):
    """Base class of `LongNetEncoder` and `LongNetLM`: an embedding, pre-norm blocks, a final norm.

    It follows LongNet (Ding et al. 2023, arXiv:2307.02486), and with `config.sub_ln` MAGNETO (arXiv:2210.06423).
    A subclass adds `forward`, which calls `embed` and `hidden`.

    Attributes:
        gradient_checkpointing: in training, keep only the input of each block and recompute the rest in the backward.
            False at first; may be set at any time.

    After `parallel.set_context_parallel(model, mesh)` inputs and results are this rank's shard of a sequence.
    """

    def __init__(self, config: LongNetConfig, *, backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        self.gradient_checkpointing = False
        self.embedding = None if config.vocab_size is None else nn.Embedding(config.vocab_size, config.embed_dim)
        options = attention_options(config, backend)
        options |= {"dropout": config.dropout, "attention_dropout": config.attention_dropout}
        blocks = [TransformerBlock(mlp_dim=config.mlp_width, **options) for _ in range(config.num_layers)]
        self.blocks = nn.ModuleList(blocks)
        if config.selection is not None:
            for block in self.blocks:
                block.attention = SelectedAttention(config, backend)
        self.norm = nn.LayerNorm(config.embed_dim, config.norm_eps) if config.final_norm else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters as the constructor does, for example those of a model that was made on the meta device.

        Weights are normal with standard deviation 1 / sqrt(fan in), divided by sqrt(2 num_layers) for projections
        whose output is added to the residual stream.

        With sub_ln the blocks follow MAGNETO's initialisation: Xavier normal, with gain sqrt(log(2 num_layers)) for
        values, outputs and the MLP, and with gain 1 for queries and keys.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # a language model's own output.weight, without a dot before it, adds to nothing
                adds = 1
                if name.endswith((".output.weight", "mlp.2.weight")):
                    adds = 2 * self.config.num_layers
                nn.init.normal_(parameter, std=(parameter.shape[1] * adds) ** -0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:  # of a LayerNorm
                nn.init.ones_(parameter)
        if not self.config.sub_ln:
            return

        gain = math.sqrt(math.log(2 * self.config.num_layers))
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            attention = block.attention
            rows = [heads * attention.head_dim for heads in attention.heads]
            _draw_parts(attention.input.weight, rows, (1.0, 1.0, gain))
            for name in ("attention.output.weight", "mlp.0.weight", "mlp.2.weight"):
                nn.init.xavier_normal_(block.get_parameter(name), gain)

    def embed(self, inputs: Tensor) -> Float[Tensor, "batch seq embed_dim"]:
        """Return the embeddings of token ids `(batch, seq)`. With `vocab_size=None`, inputs are vectors `(batch, seq,
        embed_dim)`, returned as they are."""
        config = self.config
        if self.embedding is None:
            if inputs.dim() != 3 or inputs.shape[2] != config.embed_dim or not inputs.is_floating_point():
                raise ValueError(
                    f"inputs must be (batch, seq, embed_dim={config.embed_dim}) vectors, as vocab_size is None; "
                    f"got {inputs.dtype} of shape {tuple(inputs.shape)}"
                )
            return inputs
        require_tokens(inputs, config.vocab_size)
        return self.embedding(inputs.long())

    def hidden(
        self,
        x: Float[Tensor, "batch seq embed_dim"],
        *,
        is_causal: bool,
        positions: Int[Tensor, "*batch seq"] | None = None,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        cu_seqlens: Sequence[int] | Int[Tensor, " samples_and_one"] | None = None,
        seq_len: int | None = None,
        cache: KeyValueCache | None = None,
        all_layers: bool = False,
        first_only: bool = False,
    ) -> list[Float[Tensor, "batch seq embed_dim"]]:
        """Return [last], the states after the last block and the final norm.

        With `all_layers` return layers + 2 states: x, the states after each block, and last. x is the embedding. With
        lengths, samples are packed one after another for all layers, so that padding costs nothing and no sample sees
        another; states are 0 at padding. With cu_seqlens the samples are packed already, and the result is packed too.

        Args:
            positions, seq_len, first_only: as in `LongNetEncoder.forward`.
            cache: a new cache, which gets the keys and values of these tokens.
        """
        batch, seq, _ = x.shape
        whole = self._whole_length(x, seq_len)
        if self.mesh is not None:
            if lengths is not None:
                raise UnsupportedError(
                    "lengths with a mesh is not supported; call parallel.set_context_parallel(model, None) first"
                )
            seq_len = whole
        asked = _Asked(is_causal, seq_len, cache, all_layers, first_only)

        if cu_seqlens is not None:
            if lengths is not None:
                raise ValueError(
                    "lengths and cu_seqlens both given; lengths is for padded batches, cu_seqlens for packed"
                )
            return self._packed(x, positions, packed_counts(cu_seqlens, batch, whole), asked)

        counts = None
        if lengths is not None:
            counts = checked_lengths(lengths, batch, seq)
            if all(count == seq for count in counts):
                counts = None  # nothing is padding
        places = self._places(x, seq_len, positions, counts)
        if counts is None:
            return self._run(x, None, places, asked)

        kept = within(counts, seq, x.device)
        if places is not None:
            places = (places[0].expand(batch, seq)[kept], places[1].expand(batch, seq)[kept])
        states = self._run(x[kept][None], counts, places, asked)
        return [padded(state, kept) for state in states]

    def _packed(self, x: Tensor, positions: Tensor | None, counts: list[int], asked: _Asked) -> list[Tensor]:
        """Return the states that `hidden` returns for packed samples; counts: the number of tokens of each."""
        if asked.first_only and 0 in counts:
            raise ValueError(f"first_only=True: each sample must have a first token; got samples of {counts}")
        if self.mesh is not None or positions is not None or counts[1:] != counts[:-1]:
            return self._run(x, counts, self._packed_places(x, positions, counts, asked.seq_len), asked)

        # Samples of one length are a batch without padding.
        width = x.shape[2]
        seq = counts[0] if counts else 1
        x = x.view(len(counts), seq, width)
        states = self._run(x, None, self._places(x, None), asked)
        return [state.reshape(1, -1, width) for state in states]

    def _run(self, x: Tensor, counts: list[int] | None, places: Places | None, asked: _Asked) -> list[Tensor]:
        """Return the states that `hidden` returns, packed if x is, and fill the cache. Packed samples may run in parts.

        counts: the tokens of each packed sample; None: x is not packed. places: from `_places` or `_packed_places`.
        """
        cache = asked.cache
        runs = []
        if counts is not None and cache is None and self.mesh is None:
            runs = packs(counts)
        # Not in training: a checkpoint's forward without gradients must draw the dropout that its recomputation draws.
        if len(runs) > 1 and not (torch.is_grad_enabled() or self.training):
            found = []
            for pack, tokens in runs:
                pack_places = None
                if places is not None:
                    pack_places = (places[0][tokens], places[1][tokens])
                found.append(self._run(x[:, tokens], pack, pack_places, asked))
            return [torch.cat(states, 1) for states in zip(*found, strict=True)]

        cu_seqlens = None
        if counts is not None:
            cu_seqlens = cumulative(counts, x.device)
        tables = self._tables(x, places)
        if cache is None:
            return self._blocks(x, tables, cu_seqlens, asked)

        whole = self._whole_length(x, asked.seq_len)
        lengths = counts
        if lengths is None:
            lengths = [whole] * len(x)
        shard = None
        if self.mesh is not None:
            shard = sequence_range(whole, self.mesh)
        cache.begin(lengths, packed=cu_seqlens is not None, shard=shard)
        states = self._blocks(x, tables, cu_seqlens, asked)
        cache.end(lengths)
        if self.mesh is not None:
            cache.join(self.mesh)
        return states

    def _blocks(self, x: Tensor, tables: Tables | None, cu_seqlens: Tensor | None, asked: _Asked) -> list[Tensor]:
        """Run the blocks and the norm, and return the states that `hidden` returns; cu_seqlens: for packed samples."""
        dropped = None
        if self.mesh is not None and self.training and self.config.dropout:
            dropped = ShardDropout(agreed_seed(self.mesh, x.device), self._first_token(asked.seq_len))
        states = []
        for i, block in enumerate(self.blocks):
            if asked.all_layers:
                states.append(x)
            options: dict[str, Any] = {
                "cu_seqlens": cu_seqlens,
                "seq_len": asked.seq_len,
                "first_only": asked.first_only and block is self.blocks[-1],
            }
            if asked.cache is not None:
                options["memory"] = asked.cache.layers[i]
            if dropped is not None:
                options["shard_dropout"] = replace(dropped, layer=i)
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(block, x, tables, asked.is_causal, use_reentrant=False, **options)
            else:
                x = block(x, tables, asked.is_causal, **options)
        if asked.all_layers:
            states.append(x)
        return [*states, self.norm(x)]


class Pooling(Pretrained):
    """Base class of models that embed whole images or slides for a LongNet, `encoder`, and pool its states.

    A shard holds only a part of a sample's positions, and of its mean.
    """

    encoder: LongNetStack

    def set_context_parallel(self, mesh: Any, transport: str = "auto", layer: str = "") -> None:
        """Refuse a mesh, as `_require_one_device` does."""
        self._require_one_device(mesh)

    def _require_one_device(self, mesh: Any) -> None:
        """Raise UnsupportedError if a mesh is given. The message advises sharding `encoder` alone."""
        if mesh is not None:
            raise UnsupportedError(
                f"{type(self).__name__} with a mesh is not supported: it embeds and pools whole images or slides. Call "
                "parallel.set_context_parallel(model, None); or parallel.set_context_parallel(model.encoder, mesh), "
                "and give model.encoder this rank's shard of what it reads"
            )
