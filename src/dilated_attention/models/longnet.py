"""LongNet: encoder, language model, encoder-decoder."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilated_attention.errors import UnsupportedError
from dilated_attention.models import generation
from dilated_attention.models.configuration import EncoderDecoderConfig, LongNetConfig
from dilated_attention.models.generation import KeyValueCache
from dilated_attention.models.pretrained import Pretrained
from dilated_attention.nn import CrossAttention, SelfAttention, TransformerBlock
from dilated_attention.parallel.sharding import cp_mean, mesh_size, sequence_range, shard_sequence

MANY = 256  # samples of one token each: more likely tokens of one sample

# Packed tokens that run together without gradients, unless a sample alone has more: enough to fill a device. More would
# take memory, and on CPU time: large new memory costs as much as a sum over it.
_PACK = 8192


class LongNetStack(Pretrained):
    """What all LongNets share: an embedding, pre-norm blocks, a final norm (LongNet, Ding et al. 2023,
    arXiv:2307.02486; with `config.sub_ln` on MAGNETO, arXiv:2210.06423).

    Attributes:
        gradient_checkpointing: in training, keep only the input of each block for the backward and compute the rest
            again there. False at first; any time.

    After `parallel.set_context_parallel(model, mesh)` inputs and results are this rank's shard of a sequence.
    """

    configuration = LongNetConfig
    config: LongNetConfig

    def __init__(
        self, config: LongNetConfig, *, backend: str = "auto", cross_attention: bool = False, gain: float | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        self.gradient_checkpointing = False
        self.mesh: Any = None
        self.embedding = None if config.vocab_size is None else nn.Embedding(config.vocab_size, config.embed_dim)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                config.embed_dim,
                config.num_heads,
                config.kv_heads,
                config.mlp_width,
                config.pattern,
                backend,
                bias=config.bias,
                sub_ln=config.sub_ln,
                norm_eps=config.norm_eps,
                dropout=config.dropout,
                attention_dropout=config.attention_dropout,
                compat=config.compat,
                cross_attention=cross_attention,
            )
            for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.embed_dim, config.norm_eps) if config.final_norm else nn.Identity()
        self.gain = math.sqrt(math.log(2 * config.num_layers)) if gain is None else gain
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal of deviation 1 / sqrt(fan in); what adds to the residual stream is divided by sqrt(2 num_layers).

        With sub_ln MAGNETO's: Xavier normal, of gain sqrt(log(2 num_layers)) for values, outputs and the MLP (in an
        encoder-decoder sqrt(log(3 decoder layers) log(2 encoder layers) / 3) and sqrt(log(3 decoder layers))), and of
        gain 1 for all else.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds = 2 * self.config.num_layers if name.endswith(("output.weight", "mlp.2.weight")) else 1
                nn.init.normal_(parameter, std=(parameter.shape[1] * adds) ** -0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if not self.config.sub_ln:
            return
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            attention, cross = block.attention, block.cross_attention
            parts = attention.input.weight.split([heads * attention.head_dim for heads in attention.heads])
            for weight, gain in zip(parts, (1.0, 1.0, self.gain), strict=True):
                nn.init.xavier_normal_(weight, gain)
            for name in ("attention.output.weight", "mlp.0.weight", "mlp.2.weight"):
                nn.init.xavier_normal_(block.get_parameter(name), self.gain)
            if cross is not None:
                for weight in (cross.input.weight, *cross.source.weight.chunk(2), cross.output.weight):
                    nn.init.xavier_normal_(weight)

    def set_context_parallel(self, mesh: Any, transport: str = "auto", layer: str = "") -> None:
        """What `parallel.set_context_parallel` calls; use that, which reaches the attention of every block too."""
        self.mesh = mesh

    def embed(self, inputs: Tensor) -> Float[Tensor, "batch seq embed_dim"]:
        """Tokens through the embedding; vectors as they are, where there is none."""
        config = self.config
        if self.embedding is None:
            if inputs.dim() != 3 or inputs.shape[2] != config.embed_dim or not inputs.is_floating_point():
                raise ValueError(
                    f"inputs must be (batch, seq, embed_dim={config.embed_dim}) vectors, as vocab_size is None; "
                    f"got {inputs.dtype} of shape {tuple(inputs.shape)}"
                )
            warn_of_layout(inputs)
            return inputs
        if inputs.dim() != 2 or inputs.is_floating_point() or inputs.dtype == torch.bool:
            raise ValueError(
                f"inputs must be (batch, seq) token ids; got {inputs.dtype} of shape {tuple(inputs.shape)}"
            )
        warn_of_layout(inputs)
        return self.embedding(inputs)

    def hidden(
        self,
        x: Float[Tensor, "batch seq embed_dim"],
        *,
        is_causal: bool,
        positions: Int[Tensor, "*batch seq"] | None = None,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        seq_len: int | None = None,
        cache: KeyValueCache | None = None,
        all_layers: bool = False,
        first_only: bool = False,
        **sources: Any,
    ) -> list[Float[Tensor, "batch seq embed_dim"]]:
        """The states from the embedding x to the normed last one: [last], or with `all_layers` [x, after each block,
        last].

        With lengths, samples are packed one after another for all layers, so that padding costs nothing and no sample
        sees another; states are 0 where they are padding.

        Args:
            first_only: as in `packed`; without lengths.
            sources: `sources` and `source_mask` of cross-attention.
        """
        assert not (first_only and lengths is not None)
        batch, seq, _ = x.shape
        if self.mesh is not None:
            for name, given in (("lengths", lengths), ("a cache", cache), ("source", sources.get("sources"))):
                if given is not None:
                    raise UnsupportedError(
                        f"{name} with a mesh is not supported; call parallel.set_context_parallel(model, None) first"
                    )
            seq_len = seq * mesh_size(self.mesh) if seq_len is None else seq_len
        counts = [seq] * batch if lengths is None else checked_lengths(lengths, batch, seq)
        places = None if self.config.rotary is None else self._positions(x, positions, counts, seq_len)
        options: dict[str, Any] = {
            "is_causal": is_causal, "seq_len": seq_len, "cache": cache, "all_layers": all_layers,
            "first_only": first_only, **sources,
        }  # fmt: skip
        if min(counts, default=seq) == seq:
            return self._run(x, counts, places, None, **options)
        kept = within(counts, seq, x.device)
        if places is not None:
            places = (places[0].expand(batch, seq)[kept], places[1].expand(batch, seq)[kept])
        states = self._run(x[kept][None], counts, places, cumulative(counts, x.device), **options)
        return [padded(state, kept) for state in states]

    def packed(
        self,
        x: Float[Tensor, "1 tokens embed_dim"],
        counts: Sequence[int],
        *,
        is_causal: bool,
        all_layers: bool = False,
        first_only: bool = False,
    ) -> list[Float[Tensor, "1 tokens embed_dim"]]:
        """As `hidden`, of samples of `counts` tokens that are packed already, and stay so.

        first_only: `(1, samples, embed_dim)`, of each sample's first token; the last block computes nothing else. Not
        with all_layers.
        """
        assert not (all_layers and first_only)
        if self.mesh is not None:
            raise UnsupportedError(
                "lengths with a mesh is not supported; call parallel.set_context_parallel(model, None)"
            )
        if len(set(counts)) == 1:  # nothing to pack
            options: dict[str, Any] = {"all_layers": all_layers, "first_only": first_only}
            states = self.hidden(x.view(len(counts), -1, x.shape[-1]), is_causal=is_causal, **options)
            return [state.reshape(1, -1, x.shape[-1]) for state in states]
        places = None
        if self.config.rotary is not None:
            kept = within(counts, max(counts, default=0), x.device)
            both = self._positions(x.new_empty(*kept.shape, 0), None, list(counts), None)
            places = (both[0].expand(kept.shape)[kept], both[1].expand(kept.shape)[kept])
        cu_seqlens = cumulative(counts, x.device)
        options = {"all_layers": all_layers, "first_only": first_only}
        return self._run(x, list(counts), places, cu_seqlens, is_causal=is_causal, **options)

    def _run(
        self,
        x: Tensor,
        counts: list[int],
        places: tuple[Tensor, Tensor] | None,
        cu_seqlens: Tensor | None,
        *,
        is_causal: bool,
        all_layers: bool,
        first_only: bool = False,
        seq_len: int | None = None,
        cache: KeyValueCache | None = None,
        sources: list[tuple[Tensor, Tensor]] | None = None,
        source_mask: Tensor | None = None,
    ) -> list[Tensor]:
        """The blocks and the norm. places: positions and the origins of xPos; cu_seqlens: where samples are packed."""
        packs = _packs(counts) if cu_seqlens is not None and cache is None and sources is None else []
        if len(packs) > 1 and not torch.is_grad_enabled():
            options: dict[str, Any] = {"is_causal": is_causal, "all_layers": all_layers, "first_only": first_only}
            found = []
            for pack, tokens in packs:
                some = None if places is None else (places[0][tokens], places[1][tokens])
                found.append(self._run(x[:, tokens], pack, some, cumulative(pack, x.device), **options))
            return [torch.cat(states, 1) for states in zip(*found, strict=True)]
        tables = None
        if places is not None:
            assert self.config.rotary is not None
            tables = self.config.rotary.tables(places[0], places[1], torch.promote_types(x.dtype, torch.float32))
        if cache is not None:
            cache.begin(counts, packed=cu_seqlens is not None)
        states = [x]
        for i, block in enumerate(self.blocks):
            options = {
                "cu_seqlens": cu_seqlens,
                "seq_len": seq_len,
                "memory": None if cache is None else cache.layers[i],
                "source": None if sources is None else sources[i],
                "source_mask": source_mask,
                "first_only": first_only and block is self.blocks[-1],
            }
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(block, x, tables, is_causal, use_reentrant=False, **options)
            else:
                x = block(x, tables, is_causal, **options)
            states = [*states, x] if all_layers else [x]
        if cache is not None:
            cache.end(counts)
        return [*states, self.norm(x)] if all_layers else [self.norm(x)]

    def _positions(
        self, x: Tensor, positions: Tensor | None, counts: list[int], seq_len: int | None
    ) -> tuple[Tensor, Tensor]:
        """The position of every token, and the origin of xPos, the middle of every sample: `(batch or 1, seq or 1)`.

        seq_len: over a mesh, the length of the whole sequence.
        """
        rotary, (batch, seq, _) = self.config.rotary, x.shape
        assert rotary is not None
        if self.mesh is not None:
            assert seq_len is not None
            if positions is not None:
                raise UnsupportedError("positions with a mesh is not supported; they count from the sequence's start")
            rotary.check((seq_len + 1) // 2, x.dtype)
            start = sequence_range(seq_len, self.mesh)[0]
            return torch.arange(start, start + seq, device=x.device)[None], torch.full((1, 1), seq_len // 2).to(
                x.device
            )
        if positions is None:
            rotary.check((seq + 1) // 2, x.dtype)
            origins = torch.tensor([count // 2 for count in counts], device=x.device)[:, None]
            same = len(set(counts)) == 1
            return torch.arange(seq, device=x.device)[None], origins[:1] if same else origins
        if positions.shape not in ((seq,), (batch, seq)):
            raise ValueError(
                f"positions must have shape (seq,) = ({seq},) or (batch, seq); got {tuple(positions.shape)}"
            )
        positions = positions.view(-1, seq)
        if rotary.scale_base is None or not seq:
            return positions, positions[:, :1]
        origins = (positions.amin(-1, keepdim=True) + positions.amax(-1, keepdim=True)) // 2
        if not torch.compiler.is_compiling():
            rotary.check(int((positions - origins).abs().max()), x.dtype)
        return positions, origins


def _packs(counts: Sequence[int]) -> list[tuple[list[int], slice]]:
    """Runs of samples of at most `_PACK` tokens together, or one sample: their counts, and where their tokens lie."""
    packs: list[tuple[list[int], slice]] = []
    start = stop = 0
    pack: list[int] = []
    for count in counts:
        if pack and stop + count - start > _PACK:
            packs.append((pack, slice(start, stop)))
            pack, start = [], stop
        pack.append(count)
        stop += count
    return [*packs, (pack, slice(start, stop))]


def within(counts: Sequence[int], seq: int, device: torch.device) -> Bool[Tensor, "batch seq"]:
    """True at the tokens of each sample, False at its padding."""
    return torch.arange(seq, device=device) < torch.tensor(counts, device=device)[:, None]


def cumulative(counts: Sequence[int], device: torch.device) -> Int[Tensor, " samples_and_one"]:
    """Where each packed sample starts, and the end of the last."""
    return torch.tensor([0, *counts], device=device).cumsum(0)


def padded(
    x: Float[Tensor, "1 tokens embed_dim"], kept: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq embed_dim"]:
    """Packed samples, each at the start of a row of zeros."""
    full = x.new_zeros(*kept.shape, x.shape[-1])
    full[kept] = x[0]
    return full


def checked_lengths(lengths: Sequence[int] | Tensor, batch: int, seq: int) -> list[int]:
    """lengths as a list; ValueError unless they are `batch` integers in [0, seq]."""
    values = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    if not isinstance(values, list) or len(values) != batch or any(type(value) is not int for value in values):
        raise ValueError(f"lengths must be {batch} integers, one per sample; got {values!r}")
    if any(not 0 <= value <= seq for value in values):
        raise ValueError(f"lengths must lie in [0, {seq}], the padded length; got {values}")
    return values


def require_like(weight: Tensor, **inputs: Any) -> None:
    """ValueError unless the inputs are tensors of the weight's dtype; under autocast any floating dtype will do."""
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor; got {type(x).__name__}: pass torch.as_tensor({name})")
        autocast = x.is_floating_point() and torch.is_autocast_enabled(x.device.type)
        if x.dtype != weight.dtype and not autocast:
            raise ValueError(
                f"{name} must have the model's dtype, {weight.dtype}; got {x.dtype}: pass {name}.to({weight.dtype}), "
                "or turn the model with model.to(dtype)"
            )


def warn_of_layout(x: Tensor) -> None:
    """Warn where a batch-first model is given what looks like (seq, batch, ...)."""
    if x.shape[1] == 1 and x.shape[0] >= MANY:
        warnings.warn(
            f"input of shape {tuple(x.shape)} is read as (batch, seq, ...): {x.shape[0]} samples of one token each; "
            "if it is (seq, batch, ...), pass x.transpose(0, 1)",
            stacklevel=4,
        )


class LongNetAttention(Pretrained):
    """The self-attention of one LongNet layer with its positions: W_o LN A(R W_q x, R W_k x, W_v x) (`SelfAttention`).

    forward: `(batch, seq, embed_dim)` -> the same. Of the configuration it reads what belongs to attention.
    """

    configuration = LongNetConfig
    config: LongNetConfig

    def __init__(self, config: LongNetConfig, *, backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.attention = SelfAttention(
            config.embed_dim,
            config.num_heads,
            config.kv_heads,
            config.pattern,
            backend,
            bias=config.bias,
            sub_ln=config.sub_ln,
            norm_eps=config.norm_eps,
            dropout=config.attention_dropout,
            compat=config.compat,
        )

    def forward(
        self, x: Float[Tensor, "batch seq embed_dim"], is_causal: bool = False
    ) -> Float[Tensor, "batch seq embed_dim"]:
        warn_of_layout(x)
        seq, rotary, tables = x.shape[1], self.config.rotary, None
        if rotary is not None:
            rotary.check((seq + 1) // 2, x.dtype)
            positions = torch.arange(seq, device=x.device)
            tables = rotary.tables(positions, seq // 2, torch.promote_types(x.dtype, torch.float32))
        return self.attention(x, tables, is_causal)


class LongNetEncoder(LongNetStack):
    """A bidirectional LongNet.

    forward: tokens `(batch, seq)`, or vectors `(batch, seq, embed_dim)` with `vocab_size=None`, -> states
    `(batch, seq, embed_dim)`.
    """

    def forward(
        self,
        inputs: Tensor,
        *,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        positions: Int[Tensor, "*batch seq"] | None = None,
        seq_len: int | None = None,
        all_layers: bool = False,
    ) -> Tensor | list[Tensor]:
        """lengths: tokens of each sample, whose states are those that it has alone. What is after them is padding: it
            costs nothing, influences nothing, and has states 0.
        positions: `(seq,)` or `(batch, seq)`, the rotary position of each token; None = 0, 1, 2, ...
        seq_len: over a mesh, the length of the whole sequence; None: equal shards.
        all_layers: return a list: the embeddings, the states after each block, and the normed states after the last.
        """
        states = self.hidden(
            self.embed(inputs),
            is_causal=False,
            positions=positions,
            lengths=lengths,
            seq_len=seq_len,
            all_layers=all_layers,
        )
        return states if all_layers else states[-1]


class LongNetLM(LongNetStack):
    """A causal language model: embedding, blocks, norm, and the embedding again, or a matrix of its own, as output.

    forward: tokens `(batch, seq)` integers -> logits `(batch, seq, vocab_size)`; logits at t see tokens <= t.
    With `config.pattern=None` it is the same model (same parameters, same draws) with dense attention.

    Args:
        cross_attention: be the decoder of a `LongNet`, which gives it a source.
    """

    def __init__(
        self, config: LongNetConfig, *, backend: str = "auto", cross_attention: bool = False, gain: float | None = None
    ) -> None:
        if config.vocab_size is None:
            raise ValueError("vocab_size=None: a language model writes tokens; give their number")
        super().__init__(config, backend=backend, cross_attention=cross_attention, gain=gain)
        self.output = None if config.tie_embeddings else nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        if self.output is not None:
            nn.init.normal_(self.output.weight, std=config.embed_dim**-0.5)

    def logits(self, states: Float[Tensor, "*rows embed_dim"]) -> Float[Tensor, "*rows vocab"]:
        assert self.embedding is not None
        return F.linear(states, self.embedding.weight if self.output is None else self.output.weight)

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        *,
        positions: Int[Tensor, "*batch seq"] | None = None,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        seq_len: int | None = None,
        source: Float[Tensor, "batch keys embed_dim"] | None = None,
        source_lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch seq vocab"]:
        """positions: `(seq,)` or `(batch, seq)`, the rotary position of each token; None = 0, 1, 2, ...
        lengths: tokens of each sample; padding after them costs nothing in the blocks, and its logits are 0. (Without
            it the other tokens' logits are the same: they see no later token.)
        seq_len: over a mesh, the length of the whole sequence; None: equal shards.
        source, source_lengths: the encoder's states, of a decoder with cross_attention.
        """
        sources, mask = self._read(source, source_lengths)
        (states,) = self.hidden(
            self.embed(tokens),
            is_causal=True,
            positions=positions,
            lengths=lengths,
            seq_len=seq_len,
            sources=sources,
            source_mask=mask,
        )
        return self.logits(states)

    def _read(
        self, source: Tensor | None, source_lengths: Sequence[int] | Tensor | None
    ) -> tuple[list[tuple[Tensor, Tensor]] | None, Tensor | None]:
        crosses = [x for x in self.modules() if isinstance(x, CrossAttention)]
        if source is None or not crosses:
            if source is None and not crosses:
                return None, None
            raise ValueError(
                "source: a decoder with cross_attention needs the encoder's states, and no other takes them"
            )
        mask = None
        if source_lengths is not None:
            counts = checked_lengths(source_lengths, source.shape[0], source.shape[1])
            if not min(counts):
                raise ValueError(f"source_lengths must be positive: a decoder needs something to read; got {counts}")
            mask = within(counts, source.shape[1], source.device)[:, None, None]
        return [cross.read(source) for cross in crosses], mask

    def loss(
        self, tokens: Int[Tensor, "batch seq_and_one"], lengths: Sequence[int] | Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, ""]:
        """Mean cross entropy in nats of tokens[:, 1:] given all before each; of ragged samples, of those within
        lengths.

        Over a mesh every rank passes the same whole tokens and gets the same mean. The gradient of each rank's shard is
        scaled so that the mean over the mesh of the ranks' gradients is that of one device (`cp_mean`).
        """
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self.mesh is not None:
            if lengths is not None:
                raise UnsupportedError("lengths with a mesh is not supported; give samples of one length")
            shard, own = shard_sequence(inputs, self.mesh), shard_sequence(targets, self.mesh)
            logits = self(shard, seq_len=inputs.shape[1])
            total = F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
            return cp_mean(total, own.numel(), self.mesh)
        if lengths is None:
            return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
        counts = [max(n - 1, 0) for n in checked_lengths(lengths, *tokens.shape)]
        kept = (
            torch.arange(targets.shape[1], device=tokens.device) < torch.tensor(counts, device=tokens.device)[:, None]
        )
        return F.cross_entropy(self(inputs, lengths=counts)[kept], targets[kept])

    @torch.no_grad()
    def prefill(
        self,
        tokens: Int[Tensor, "batch seq"],
        *,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        max_len: int | None = None,
        source: Float[Tensor, "batch keys embed_dim"] | None = None,
        source_lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
    ) -> tuple[Float[Tensor, "batch vocab"], KeyValueCache]:
        """The logits after the last token of each prompt, and the cache to continue from.

        Args:
            lengths: tokens of each prompt, at least 1, where they differ.
            max_len: the most tokens that a sample will have; None: any number (not with dense attention).
            source, source_lengths: as in `forward`.
        """
        if self.mesh is not None:
            raise UnsupportedError("generate runs on one device; call parallel.set_context_parallel(model, None) first")
        batch, seq = tokens.shape
        counts = [seq] * batch if lengths is None else checked_lengths(lengths, batch, seq)
        if not counts or not min(counts):
            raise ValueError("tokens: empty prompt; give at least one token a sample")
        x = self.embed(tokens)
        cache = KeyValueCache(self.config, batch, max_len=max_len, dtype=x.dtype, device=x.device)
        cache.sources, cache.source_mask = self._read(source, source_lengths)
        (states,) = self.hidden(
            x,
            is_causal=True,
            lengths=counts,
            cache=cache,
            sources=cache.sources,
            source_mask=cache.source_mask,
        )
        last = torch.tensor(counts, device=x.device) - 1
        return self.logits(states[torch.arange(batch, device=x.device), last]), cache

    @torch.no_grad()
    def decode(self, tokens: Int[Tensor, " batch"], cache: KeyValueCache) -> Float[Tensor, "batch vocab"]:
        """The logits after one more token of each sample, which the cache then holds; the same as `forward` over all
        its tokens gives at its position."""
        if tokens.shape != (cache.batch_size,):
            raise ValueError(
                f"tokens must be ({cache.batch_size},), one for each sample of the cache; got {tuple(tokens.shape)}"
            )
        x = self.embed(tokens[:, None])
        positions, rotary = cache.step(), self.config.rotary
        tables = (
            None
            if rotary is None
            else rotary.tables(positions, cache.origins, torch.promote_types(x.dtype, torch.float32))
        )
        for i, block in enumerate(self.blocks):
            source = None if cache.sources is None else cache.sources[i]
            x = block(x, tables, True, memory=cache.layers[i], source=source, source_mask=cache.source_mask)
        cache.end([1] * cache.batch_size)
        return self.logits(self.norm(x)[:, 0])

    def stream(
        self,
        tokens: Int[Tensor, "batch seq"],
        max_new_tokens: int,
        *,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_token: int | None = None,
        generator: torch.Generator | None = None,
        source: Float[Tensor, "batch keys embed_dim"] | None = None,
        source_lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
    ) -> Iterator[Int[Tensor, " batch"]]:
        """Sampled tokens that continue the prompts, one of each sample at a time, as soon as they are drawn.

        The prompts are read once; each further token costs the same at any position. Arguments as in `generate`.
        """
        if type(max_new_tokens) is not int or max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={max_new_tokens!r}: must be an integer >= 0")
        generation.check_sampling(temperature, top_k, top_p)
        first, cache = self.prefill(
            tokens,
            lengths=lengths,
            max_len=tokens.shape[1] + max_new_tokens,
            source=source,
            source_lengths=source_lengths,
        )
        return generation.stream(
            self,
            first,
            cache,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop_token=stop_token,
            generator=generator,
        )

    def generate(
        self, tokens: Int[Tensor, "batch seq"], max_new_tokens: int, **options: Any
    ) -> Int[Tensor, "batch longer"]:
        """tokens, each sample followed by `max_new_tokens` sampled ones, or fewer after `stop_token`.

        Args:
            lengths: tokens of each prompt, where they differ; what follows a sample's new tokens is 0.
            temperature: of the softmax; 0 takes the likeliest.
            top_k, top_p: sample among the k likeliest tokens, or the fewest that reach probability p together.
            stop_token: where a sample ends; it is repeated until all samples have ended.
            generator: of the draws.
            source, source_lengths: as in `forward`.
        """
        new = list(self.stream(tokens, max_new_tokens, **options))
        if not new:
            return tokens
        drawn = torch.stack(new, 1).to(tokens.dtype)
        lengths = options.get("lengths")
        if lengths is None:
            return torch.cat((tokens, drawn), 1)
        counts = torch.tensor(checked_lengths(lengths, *tokens.shape), device=tokens.device)[:, None]
        seq = torch.arange(tokens.shape[1], device=tokens.device)
        out = torch.cat((tokens.masked_fill(seq >= counts, 0), torch.zeros_like(drawn)), 1)
        return out.scatter(1, counts + torch.arange(len(new), device=tokens.device), drawn)


class LongNet(Pretrained):
    """An encoder-decoder: a `LongNetEncoder`, and a causal decoder with dense cross-attention to its states.

    forward: source (tokens, or vectors where the encoder has `vocab_size=None`) and target tokens `(batch, seq)` ->
    logits `(batch, seq, vocab_size)` of the decoder; those at t see the whole source and the target up to t.

    Dilated are the self-attentions; the paper defines no dilated cross-attention, and torchscale has none.
    """

    configuration = EncoderDecoderConfig
    config: EncoderDecoderConfig

    def __init__(self, config: EncoderDecoderConfig, *, backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        n, m = config.encoder.num_layers, config.decoder.num_layers
        gain = math.sqrt(math.log(3 * m) * math.log(2 * n) / 3)
        self.encoder = LongNetEncoder(config.encoder, backend=backend, gain=gain)
        gain = math.sqrt(math.log(3 * m))
        self.decoder = LongNetLM(config.decoder, backend=backend, cross_attention=True, gain=gain)

    def forward(
        self,
        source: Tensor,
        target: Int[Tensor, "batch seq"],
        *,
        source_lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch seq vocab"]:
        """source_lengths: tokens of each source; padding influences nothing. (Padding after a target needs no telling:
        no token before it sees it.)"""
        states = self.encoder(source, lengths=source_lengths)
        return self.decoder(target, source=states, source_lengths=source_lengths)

    @torch.no_grad()
    def generate(
        self,
        source: Tensor,
        target: Int[Tensor, "batch seq"],
        max_new_tokens: int,
        *,
        source_lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        **options: Any,
    ) -> Int[Tensor, "batch longer"]:
        """target continued by `max_new_tokens` sampled tokens; options as in `LongNetLM.generate`."""
        states = self.encoder(source, lengths=source_lengths)
        return self.decoder.generate(target, max_new_tokens, source=states, source_lengths=source_lengths, **options)
