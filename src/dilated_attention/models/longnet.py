"""Provide LongNet as encoder and language model, and the attention of one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dilated_attention import UnsupportedError
from dilated_attention.models.configuration import IndexedKeys, LongNetConfig
from dilated_attention.models.generation import KeyValueCache, check_sampling, sample
from dilated_attention.models.packing import checked_lengths, require_tokens, warn_of_layout, within
from dilated_attention.models.stack import LongNetStack, Positioned, attention_options
from dilated_attention.nn import SelfAttention
from dilated_attention.parallel import cp_mean, sequence_range, shard_sequence
from dilated_attention.plumbing import checks, dtype_of_products, from_rank, hooked, mesh_size, require_same


class LongNetAttention(Positioned):
    """Compute the self-attention of one LongNet layer with its positions (see `SelfAttention`).

    It computes W_o LN A(R W_q x, R W_k x, W_v x) for x `(batch, seq, embed_dim)`, with rotary positions R, attention A
    and, if `sub_ln`, the LayerNorm LN; the result has the same shape. Only the attention settings of the
    configuration are used.

    Examples:
        >>> from dilated_attention import Dilated
        >>> from dilated_attention.models import LongNetAttention, LongNetConfig
        >>> config = LongNetConfig(embed_dim=32, num_layers=2, num_heads=4, pattern=Dilated([8, 32], [1, 4]))
        >>> LongNetAttention(config)(torch.randn(1, 40, 32)).shape
        torch.Size([1, 40, 32])
    """

    def __init__(self, config: LongNetConfig, *, backend: str = "auto") -> None:
        super().__init__()
        if config.selection is not None:
            raise UnsupportedError(
                "LongNetAttention with config.selection is not supported: it is a layer of dilated attention"
            )
        self.config = config
        options = attention_options(config, backend)
        self.attention = SelfAttention(**options, dropout=config.attention_dropout)

    def forward(
        self, x: Float[Tensor, "batch seq embed_dim"], is_causal: bool = False, *, seq_len: int | None = None
    ) -> Float[Tensor, "batch seq embed_dim"]:
        """Return the attention's output, shaped like x.

        Args:
            seq_len: over a mesh, the length of the whole sequence; None: equal shards.
        """
        warn_of_layout(x)
        places = self._places(x, self._whole_length(x, seq_len))
        return self.attention(x, self._tables(x, places), is_causal, seq_len=seq_len)


class LongNetEncoder(LongNetStack):
    """Encode sequences with a bidirectional LongNet.

    forward takes tokens `(batch, seq)`, or vectors `(batch, seq, embed_dim)` if `vocab_size=None`, and returns
    states `(batch, seq, embed_dim)`.

    Examples:
        >>> from dilated_attention import Dilated
        >>> from dilated_attention.models import LongNetConfig, LongNetEncoder
        >>> config = LongNetConfig(embed_dim=32, num_layers=2, num_heads=4, pattern=Dilated([8, 32], [1, 4]))
        >>> model, tokens = LongNetEncoder(config).eval(), torch.randint(256, (2, 40))
        >>> states = model(tokens, lengths=[40, 25])
        >>> torch.allclose(states[1:, :25], model(tokens[1:, :25]), atol=1e-5)  # padding changes nothing
        True
    """

    def __init__(self, config: LongNetConfig, *, backend: str = "auto") -> None:
        if config.selection is not None:
            raise UnsupportedError("an encoder with config.selection is not supported: such attention is causal")
        super().__init__(config, backend=backend)

    def forward(
        self,
        inputs: Tensor,
        *,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        positions: Int[Tensor, "*batch seq"] | None = None,
        cu_seqlens: Sequence[int] | Int[Tensor, " samples_and_one"] | None = None,
        seq_len: int | None = None,
        all_layers: bool = False,
        first_only: bool = False,
    ) -> Tensor | list[Tensor]:
        """Return the states of all tokens.

        Args:
            inputs: token ids or vectors, see the class.
            lengths: number of tokens of each sample, which gets the states that it would have alone. The rest is
                padding: it costs nothing, affects nothing, and gets states 0.
            cu_seqlens: the edges of samples that are packed one after another, batch 1, from 0 to seq. Each sample gets
                the states that it would have alone.
            positions: `(seq,)` or `(batch, seq)`, the rotary position of each token; None = 0, 1, 2, ...
            seq_len: over a mesh, the length of the whole sequence; None: equal shards.
            all_layers: return a list of layers + 2 states: the embeddings, the states after each block, and the last of
                these after the final norm.
            first_only: return the state of each sample's first token alone, `(batch, 1, embed_dim)`, or `(1, samples,
                embed_dim)` for packed samples; the last block computes nothing else. Not allowed with all_layers or
                lengths.
        """
        if first_only and (all_layers or lengths is not None):
            raise ValueError("first_only=True takes neither all_layers nor lengths; pack the samples with cu_seqlens")
        x = self.embed(inputs)
        warn_of_layout(inputs)
        states = self.hidden(
            x,
            is_causal=False,
            positions=positions,
            lengths=lengths,
            cu_seqlens=cu_seqlens,
            seq_len=seq_len,
            all_layers=all_layers,
            first_only=first_only,
        )
        return states if all_layers else states[-1]


class LongNetLM(LongNetStack):
    """Predict the next token with a causal LongNet: embedding, blocks, norm, and an output projection.

    The output projection is the embedding, or a separate matrix. forward takes tokens `(batch, seq)`, integers, and
    returns logits `(batch, seq, vocab_size)`; the logits at t see the tokens up to t. With `config.pattern=None` the
    model has the same parameters, with the same initial values, and dense attention.

    Examples:
        >>> from dilated_attention import Dilated
        >>> from dilated_attention.models import LongNetConfig, LongNetLM
        >>> config = LongNetConfig(embed_dim=32, num_layers=2, num_heads=4, pattern=Dilated([8, 32], [1, 4]))
        >>> model, tokens = LongNetLM(config), torch.randint(256, (1, 40))
        >>> model(tokens).shape
        torch.Size([1, 40, 256])
        >>> model.generate(tokens, max_new_tokens=3, temperature=0).shape
        torch.Size([1, 43])
    """

    def __init__(self, config: LongNetConfig, *, backend: str = "auto") -> None:
        if config.vocab_size is None:
            raise ValueError("vocab_size=None: a language model writes tokens; give their number")
        super().__init__(config, backend=backend)
        self.output: nn.Linear | None = None
        if not config.tie_embeddings:
            self.output = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
            nn.init.normal_(self.output.weight, std=config.embed_dim**-0.5)

    @property
    def _vocab_size(self) -> int:
        assert self.config.vocab_size is not None
        return self.config.vocab_size

    def logits(self, states: Float[Tensor, "*rows embed_dim"]) -> Float[Tensor, "*rows vocab"]:
        if self.output is not None:
            return self.output(states)
        embedding = self.embedding
        assert embedding is not None
        if type(embedding) is nn.Embedding and not hooked(embedding):
            return F.linear(states, embedding.weight)
        # Only a call gives the rows that an adapter changes, or that are elsewhere until then.
        weight = embedding(torch.arange(self._vocab_size, device=states.device))
        return F.linear(states, weight)

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        *,
        positions: Int[Tensor, "*batch seq"] | None = None,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        cu_seqlens: Sequence[int] | Int[Tensor, " samples_and_one"] | None = None,
        seq_len: int | None = None,
    ) -> Float[Tensor, "batch seq vocab"]:
        """Return the logits of the token that follows each token.

        Args:
            positions: `(seq,)` or `(batch, seq)`, the rotary position of each token; None = 0, 1, 2, ...
            lengths: number of tokens of each sample; the padding after them costs nothing in the blocks, and its logits
                are 0. (Without lengths, the other tokens' logits are the same: they see no later token.) Over a mesh
                padding is computed.
            cu_seqlens: the edges of samples that are packed one after another, batch 1; over a mesh, the edges in the
                whole sequence. Each sample gets the logits that it would have alone.
            seq_len: over a mesh, the length of the whole sequence; None: equal shards.
        """
        x = self.embed(tokens)
        warn_of_layout(tokens)
        (states,) = self.hidden(
            x,
            is_causal=True,
            positions=positions,
            lengths=lengths if self.mesh is None else None,  # no token sees the padding after it
            cu_seqlens=cu_seqlens,
            seq_len=seq_len,
        )
        if lengths is not None and self.mesh is not None:
            whole = self._whole_length(tokens, seq_len)
            start, stop = sequence_range(whole, self.mesh)
            kept = within(checked_lengths(lengths, len(tokens), whole), whole, x.device)[:, start:stop]
            states = states.masked_fill(~kept[..., None], 0.0)
        return self.logits(states)

    def loss(
        self, tokens: Int[Tensor, "batch seq_and_one"], lengths: Sequence[int] | Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, ""]:
        """Return the mean cross entropy, in nats, of each of tokens[:, 1:] given all tokens before it.

        With lengths, only tokens within them count. Over a mesh every rank passes the same whole tokens and gets the
        same mean. The gradient of each rank's shard is scaled so that the mean of the ranks' gradients over the mesh
        equals the gradient on one device (see `parallel.cp_mean`).

        Raises:
            ValueError: no sample has two tokens, or the ranks of a mesh pass different tokens.
        """
        inputs, targets, counts, seq_len = self._next_tokens("loss", tokens, lengths)
        return self._cross_entropy(self(inputs, lengths=counts, seq_len=seq_len), targets)

    def losses(
        self, tokens: Int[Tensor, "batch seq_and_one"], lengths: Sequence[int] | Int[Tensor, " batch"] | None = None
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return `loss`, and the loss of the indexers of `config.selection`, an `IndexedKeys`; both from one forward.

        The second is the mean over tokens of KL(attention over all keys || softmax of the index), in nats, summed over
        layers (`routing.Indexer.loss`). The indexers learn from it alone, and nothing else does, so that the sum of
        both trains all parameters. Arguments are as in `loss`, also over a mesh.

        Raises:
            ValueError: as in `loss`; or the layers have no indexers.
        """
        if not isinstance(self.config.selection, IndexedKeys):
            raise ValueError(
                f"losses needs layers with indexers, selection=IndexedKeys(...); got {self.config.selection}: call loss"
            )
        inputs, targets, counts, seq_len = self._next_tokens("losses", tokens, lengths)
        x = self.embed(inputs)
        packed = counts if self.mesh is None else None  # no token sees the padding after it
        *states, last = self.hidden(x, is_causal=True, lengths=packed, seq_len=seq_len, all_layers=True)
        loss = self._cross_entropy(self.logits(last), targets)

        tables = self._tables(x, self._places(x, seq_len, counts=counts))
        parts = []
        block: Any
        for block, state in zip(self.blocks, states[:-1], strict=True):
            with torch.no_grad():
                normed = block.attention_norm(state)
            parts.append(block.attention.selected.index_loss(normed, tables, lengths=counts))
        return loss, torch.stack(parts).sum()

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of all targets but -100; over a mesh, of those of all ranks."""
        logits = logits.flatten(0, 1)
        targets = targets.flatten()
        if self.mesh is None:
            return F.cross_entropy(logits, targets)
        return cp_mean(F.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum(), self.mesh)

    def _next_tokens(
        self, name: str, tokens: Tensor, lengths: Sequence[int] | Tensor | None
    ) -> tuple[Tensor, Tensor, list[int] | None, int | None]:
        """Return the tokens that are read, the tokens that follow them, -100 after the end of a sample, how many tokens
        of each sample are read, None for all, and None for the length of the sequence.

        Over a mesh the tokens are this rank's shard, and the length is the whole sequence's. All ranks must call
        function `name` with the same tokens and lengths.
        """
        require_tokens(tokens, self.config.vocab_size)
        inputs = tokens[:, :-1]
        targets = tokens[:, 1:].long()
        if not targets.numel():
            raise ValueError(f"tokens must hold two tokens of a sample, or more; got shape {tuple(tokens.shape)}")
        counts = None
        if lengths is not None:
            values = checked_lengths(lengths, *tokens.shape)
            if max(values, default=0) < 2:
                raise ValueError(f"lengths must leave two tokens of a sample, or more; got {values}")
            counts = [max(n - 1, 0) for n in values]
            targets = targets.masked_fill(~within(counts, targets.shape[1], tokens.device), -100)
        if self.mesh is None:
            return inputs, targets, counts, None
        require_same(name, self.mesh, tokens, counts=counts)
        return shard_sequence(inputs, self.mesh), shard_sequence(targets, self.mesh), counts, inputs.shape[1]

    @torch.no_grad()
    def prefill(
        self,
        tokens: Int[Tensor, "batch seq"],
        *,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        max_len: int | None = None,
    ) -> tuple[Float[Tensor, "batch vocab"], KeyValueCache]:
        """Return the logits after the last token of each prompt, and the cache to continue from.

        Over a mesh every rank passes the same whole tokens and reads its shard of them. All ranks get the same logits
        and the whole cache, so each of them can `decode`.

        Args:
            lengths: number of tokens of each prompt, at least 1; needed if they differ.
            max_len: the most tokens that a sample will have; None: any number (not with dense attention).
        """
        require_tokens(tokens, self.config.vocab_size)
        if self.config.selection is not None and self.mesh is not None:
            raise UnsupportedError(
                "generation over a mesh is not supported with config.selection; call "
                "parallel.set_context_parallel(model, None) first"
            )
        batch, seq = tokens.shape
        counts = [seq] * batch
        if lengths is not None:
            counts = checked_lengths(lengths, batch, seq)
        if not counts or not min(counts):
            raise ValueError("tokens: empty prompt; give at least one token per sample")

        options: dict[str, Any] = {"lengths": counts}
        if self.mesh is not None:
            require_same("prefill", self.mesh, tokens, lengths=counts, max_len=max_len)
            tokens = shard_sequence(tokens, self.mesh)
            options = {"lengths": lengths, "seq_len": seq}  # a mesh takes prompts of one length only
        x = self.embed(tokens)
        cache = KeyValueCache(self.config, batch, max_len=max_len, dtype=dtype_of_products(x), device=x.device)
        (states,) = self.hidden(x, is_causal=True, cache=cache, **options)

        if self.mesh is None:
            samples = torch.arange(batch, device=x.device)
            last = torch.tensor(counts, device=x.device) - 1
            return self.logits(states[samples, last]), cache
        newest = states.new_empty(batch, states.shape[2])
        if states.shape[1]:
            newest = states[:, -1]
        newest = from_rank(mesh_size(self.mesh) - 1, newest, self.mesh)
        return self.logits(newest), cache

    @torch.no_grad()
    def decode(self, tokens: Int[Tensor, " batch"], cache: KeyValueCache) -> Float[Tensor, "batch vocab"]:
        """Return the logits after one more token of each sample, and add the token to the cache.

        The logits equal those of `forward` over all the sample's tokens.
        """
        if tokens.shape != (cache.batch_size,):
            raise ValueError(
                f"tokens must be ({cache.batch_size},), one for each sample of the cache; got {tuple(tokens.shape)}"
            )
        if cache.config != self.config:
            raise ValueError("cache belongs to a model of another configuration; call this model's prefill")
        x = self.embed(tokens[:, None])
        positions = cache.step()
        tables = self._tables(x, (positions, cache.origins))
        for i, block in enumerate(self.blocks):
            x = block(x, tables, True, memory=cache.layers[i])
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
    ) -> Iterator[Int[Tensor, " batch"]]:
        """Return an iterator over sampled tokens that continue the prompts, one per sample at a time.

        Each step gives its tokens as soon as they are drawn. The prompts are read once; each further token reads the
        cache, whose size is fixed. Over a mesh each rank reads its shard of the prompts. All ranks compute each further
        token, and the first rank draws it. Arguments as in `generate`.
        """
        max_new_tokens = checks.integer("max_new_tokens", max_new_tokens, 0)
        check_sampling(temperature, top_k, top_p)
        if stop_token is not None:
            stop_token = checks.integer("stop_token", stop_token, 0, self._vocab_size - 1)
        require_tokens(tokens, self.config.vocab_size)

        max_len = tokens.shape[1] + max_new_tokens
        first, cache = self.prefill(tokens, lengths=lengths, max_len=max_len)
        draw = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        return self._continued(first, cache, max_new_tokens, draw, stop_token)

    @torch.no_grad()
    def _continued(
        self,
        logits: Tensor,
        cache: KeyValueCache,
        max_new_tokens: int,
        draw: Callable[[Tensor], Tensor],
        stop_token: int | None,
    ) -> Iterator[Tensor]:
        """Yield what `stream` does, from the results of `prefill`. `draw`: `sample` with its options.

        A sample that has drawn `stop_token` repeats it until all samples have; then the stream ends.
        """
        stopped = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        for i in range(max_new_tokens):
            chosen = draw(logits)
            if self.mesh is not None:
                chosen = from_rank(0, chosen, self.mesh)
            if stop_token is not None:
                chosen = chosen.masked_fill(stopped, stop_token)
                stopped |= chosen == stop_token
            yield chosen
            if i + 1 == max_new_tokens or (stop_token is not None and bool(stopped.all())):
                return
            logits = self.decode(chosen, cache)

    def generate(
        self, tokens: Int[Tensor, "batch seq"], max_new_tokens: int, **options: Any
    ) -> Int[Tensor, "batch longer"]:
        """Return tokens, each sample followed by `max_new_tokens` sampled ones, or fewer if all draw `stop_token`.

        Args:
            lengths: number of tokens of each prompt, if they differ; the entries after a sample's new tokens are 0.
            temperature: the sampling temperature; 0 always picks the most likely token.
            top_k, top_p: sample among the k most likely tokens, or the fewest that reach probability p together.
            stop_token: the token that ends a sample; it is repeated until all samples have ended.
            generator: the random generator used for sampling.
        """
        require_tokens(tokens, self.config.vocab_size)
        if torch.iinfo(tokens.dtype).max < self._vocab_size - 1:
            raise ValueError(
                f"tokens of {tokens.dtype} cannot hold every one of vocab_size={self._vocab_size}: pass tokens.long()"
            )

        new = [x[:, None].to(tokens.dtype) for x in self.stream(tokens, max_new_tokens, **options)]
        drawn = torch.cat((tokens[:, :0], *new), 1)
        lengths = options.get("lengths")
        if lengths is None:
            return torch.cat((tokens, drawn), 1)

        # Put each sample's new tokens right after its own prompt.
        counts = torch.tensor(checked_lengths(lengths, *tokens.shape), device=tokens.device)[:, None]
        seq = torch.arange(tokens.shape[1], device=tokens.device)
        out = torch.cat((tokens.masked_fill(seq >= counts, 0), torch.zeros_like(drawn)), 1)
        return out.scatter(1, counts + torch.arange(len(new), device=tokens.device), drawn)
