"""Generation: a cache of the keys and values that later tokens can still see, and sampling.

In branch (w, r) a token at p is seen by later tokens of its segment p // w alone, and only where it takes part, p mod w
mod r == o(h). So a branch needs ceil(w / r) rows per key-value head, whatever the length: row (p mod w) // r holds the
token at p, a new segment overwrites the last one, and the number of rows in use follows from p. A token's attention is
the merge of its branches' partial results over these rows; its cost is bounded by sum w / r, at any position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from numbers import Real

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from dilated_attention import Dilated
from dilated_attention.models.configuration import LongNetConfig
from dilated_attention.nn import Source
from dilated_attention.plumbing import Mesh, checks, context_group, from_rank, fused, merge_into, progressions

# Scale lengths that a position may be from the origin of xPos before the cached keys are moved to a nearer one: keys
# then grow by at most 3.5^4, and a move comes once in as many tokens.
_DRIFT = 4


@dataclass(frozen=True, slots=True)
class _Branch:
    """heads: for each offset, the runs of key-value heads that have it, as slices."""

    segment: int
    rate: int
    heads: dict[int, list[slice]]

    def rows(self, max_len: int | None) -> int:
        return -(-(self.segment if max_len is None else min(self.segment, max_len)) // self.rate)


@dataclass(frozen=True, slots=True)
class _Span:
    """Where the first tokens of some samples lie in the tensors of a layer.

    Attributes:
        samples: of the cache.
        batch, start: the tensors' samples, and where in them token 0 lies; over a mesh, before the shard.
        length: of the samples.
        held: the tokens [first, last) that are there.
    """

    samples: slice
    batch: slice
    start: int
    length: int
    held: tuple[int, int]


def _branches(config: LongNetConfig, max_len: int | None) -> list[_Branch]:
    pattern = config.pattern or Dilated((max_len or 1,), (1,))  # dense attention is one segment
    found = []
    table = pattern.offset_table(config.kv_heads)
    for segment, rate, offsets in zip(pattern.segment_lengths, pattern.dilation_rates, table, strict=True):
        heads = {
            offset: [
                slice(first, first + (count - 1) * step + 1, step)
                for first, count, step in progressions([h for h, o in enumerate(offsets) if o == offset])
            ]
            for offset in sorted(set(offsets) - {-1})
        }
        found.append(_Branch(segment, rate, heads))
    return found


class _Layer:
    """The cached rows of one layer: keys and values `(batch, heads, rows, head_dim)` of every branch.

    A branch holds the heads that it needs only, counted from `first`.
    """

    def __init__(self, cache: KeyValueCache, make: Callable[..., Tensor]) -> None:
        self.cache = cache
        self.branches: list[tuple[_Branch, int, Tensor, Tensor]] = []
        for branch in cache.branches:
            slices = [x for runs in branch.heads.values() for x in runs]
            first, last = min(x.start for x in slices), max(x.stop for x in slices)
            shape = (cache.batch_size, last - first, branch.rows(cache.max_len), cache.config.head_dim)
            self.branches.append((branch, first, make(shape), make(shape)))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        if self.cache.spans is None:
            return self._step(q, k, v)
        for span in self.cache.spans:
            self._fill(span, k, v)
        return attend(q, k, v)

    def _fill(self, span: _Span, k: Tensor, v: Tensor) -> None:
        held, end = span.held
        for branch, first, *buffers in self.branches:
            for offset, runs in branch.heads.items():
                token = span.length - span.length % branch.segment + offset  # the open segment's first that takes part
                row = max(0, -((token - held) // branch.rate))  # and the first row of those held
                rows = slice(span.start + token + row * branch.rate, span.start + end, branch.rate)
                for heads in runs if rows.start < rows.stop else ():
                    for buffer, x in zip(buffers, (k, v), strict=True):
                        seen = x[span.batch, rows, heads].transpose(1, 2)
                        buffer[span.samples, _shifted(heads, first), row : row + seen.shape[2]] = seen

    def _step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, _, heads, head_dim = q.shape
        dtype = self.cache.dtype
        statistic = torch.promote_types(dtype, torch.float32)
        grouped = q.to(dtype).reshape(batch, k.shape[2], heads // k.shape[2], head_dim)
        out = torch.zeros_like(grouped)
        lse = grouped.new_full(grouped.shape[:3], -torch.inf, dtype=statistic)
        for samples, position in self.cache.runs:
            for branch, first, keys, values in self.branches:
                row, offset = divmod(position % branch.segment, branch.rate)
                for heads_ in branch.heads.get(offset, ()):
                    held = _shifted(heads_, first)
                    keys[samples, held, row] = k[samples, 0, heads_]
                    values[samples, held, row] = v[samples, 0, heads_]
                    seen = slice(0, row + 1)
                    part, part_lse = fused.forward(
                        fused.Scores(False, head_dim**-0.5),
                        grouped[samples, heads_],
                        keys[samples, held, seen],
                        values[samples, held, seen],
                    )
                    merge_into(out[samples, heads_], lse[samples, heads_], part, part_lse.to(statistic))
        return out.view(q.shape).to(q.dtype)


def _shifted(heads: slice, first: int) -> slice:
    return slice(heads.start - first, heads.stop - first, heads.step)


class KeyValueCache:
    """What a causal LongNet remembers of the tokens so far, for a batch of samples of any lengths.

    Made by `LongNetLM.prefill`, used and updated by `LongNetLM.decode`.

    Attributes:
        positions: how many tokens each sample has.
        max_len: the most that a sample may have; None: any number.
        nbytes: of the keys and values: 2 layers x batch x sum (ceil(min(w, max_len) / r) x heads) x head_dim
            x bytes of the dtype, fixed when it is made. heads: the key-value heads that take part in the branch, all
            but with head groups or an offset of -1.
    """

    def __init__(
        self,
        config: LongNetConfig,
        batch_size: int,
        *,
        max_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if config.pattern is None and max_len is None:
            raise ValueError("max_len=None: dense attention sees every earlier token; give the length to make room for")
        max_len = None if max_len is None else checks.positive("max_len", max_len)
        self.config = config
        self.batch_size = batch_size
        self.max_len = max_len
        self.dtype = dtype
        self.device = torch.device(device)
        self.positions = [0] * batch_size
        self.branches = _branches(config, max_len)
        self.spans: list[_Span] | None = None
        self.origins = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self.source: Source | None = None  # of cross-attention
        self.source_mask: Tensor | None = None

        def make(shape: Sequence[int]) -> Tensor:
            with torch.inference_mode(False):  # else only inference mode could add to them
                return torch.zeros(shape, dtype=dtype, device=device)

        self.layers = [_Layer(self, make) for _ in range(config.num_layers)]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for layer in self.layers for *_, k, v in layer.branches for x in (k, v))

    @property
    def runs(self) -> Iterator[tuple[slice, int]]:
        """Neighbouring samples that are at one position."""
        start = 0
        for position, group in groupby(self.positions):
            count = len(list(group))
            yield slice(start, start + count), position
            start += count

    def begin(self, lengths: Sequence[int], *, packed: bool = False, shard: tuple[int, int] | None = None) -> None:
        """The layers are about to be called with the first tokens: batch x seq, or `packed` one after another; or with
        the tokens [start, stop) of every sample, a `shard`."""
        self._check(max(lengths))
        if packed:
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
            self.spans = [
                _Span(slice(i, i + 1), slice(0, 1), start, n, (0, n))
                for i, (start, n) in enumerate(zip(starts, lengths, strict=True))
            ]
        else:
            every, held = slice(0, self.batch_size), shard or (0, lengths[0])
            self.spans = [_Span(every, every, -held[0], lengths[0], held)]
        self.origins = torch.tensor([n // 2 for n in lengths], device=self.device)[:, None]  # as in the forward

    def end(self, lengths: Sequence[int]) -> None:
        """The layers have been called: each sample has this many more tokens."""
        self.spans = None
        self.positions = [a + b for a, b in zip(self.positions, lengths, strict=True)]

    def join(self, mesh: Mesh) -> None:
        """Every rank has filled the rows of its shard; now each has all."""
        for layer in self.layers:
            for *_, keys, values in layer.branches:
                for rows in (keys, values):  # 0 where others fill
                    dist.all_reduce(rows, group=context_group(mesh))

    def step(self) -> Int[Tensor, "batch 1"]:
        """The positions of the next token of every sample; moves the origin of xPos where it is too far back."""
        self._check(max(self.positions) + 1)
        positions = torch.tensor(self.positions, device=self.device)[:, None]
        rotary = self.config.rotary
        if rotary is not None and rotary.scale_base is not None:
            moves = [
                p - o if p - o > _DRIFT * rotary.scale_base else 0
                for p, o in zip(self.positions, self.origins[:, 0].tolist(), strict=True)
            ]
            self.move(moves)
        return positions

    def move(self, distances: Sequence[int]) -> None:
        """Count xPos of each sample's keys from an origin that lies `distances` tokens later."""
        rotary = self.config.rotary
        if rotary is None or rotary.scale_base is None or not any(distances):
            return
        moved = torch.tensor(distances, device=self.device)
        factor = rotary.growth(moved).to(self.device)[:, None]  # batch, 1, 1, head_dim
        for layer in self.layers:
            for _, _, keys, _ in layer.branches:
                keys.copy_(keys.to(torch.promote_types(keys.dtype, torch.float32)) * factor)
        self.origins = self.origins + moved[:, None]

    def _check(self, length: int) -> None:
        if self.max_len is not None and length > self.max_len:
            raise ValueError(f"{length} tokens do not fit a cache of max_len={self.max_len}; make it with a larger one")


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """ValueError naming the argument that `sample` cannot take."""
    if not isinstance(temperature, Real) or not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature!r}: must be a finite number >= 0")
    if top_k is not None:
        checks.positive("top_k", top_k)
    if top_p is not None and not (isinstance(top_p, Real) and 0 < top_p <= 1):
        raise ValueError(f"top_p={top_p!r}: must be a probability in (0, 1], or None")


def sample(
    logits: Float[Tensor, "batch vocab"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, " batch"]:
    """Draw one token a row from softmax(logits / temperature), cut to the likeliest and renormalised.

    Args:
        temperature: 0 takes the likeliest.
        top_k: among the k likeliest.
        top_p: among the fewest likeliest whose probabilities reach p together (nucleus sampling, Holtzman et al. 2020,
            arXiv:1904.09751), after top_k.
    """
    check_sampling(temperature, top_k, top_p)
    logits = logits.float()
    if temperature == 0:
        return logits.argmax(-1)
    # The likeliest is at 0, which no temperature makes infinite.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(logits.dtype).tiny)
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        probabilities = probabilities.masked_fill(beyond.scatter(-1, order, beyond), 0.0)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


@torch.no_grad()
def stream(
    decode: Callable[[Int[Tensor, " batch"], KeyValueCache], Float[Tensor, "batch vocab"]],
    logits: Float[Tensor, "batch vocab"],
    cache: KeyValueCache,
    max_new_tokens: int,
    draw: Callable[[Float[Tensor, "batch vocab"]], Int[Tensor, " batch"]],
    *,
    stop_token: int | None = None,
    mesh: Mesh | None = None,
) -> Iterator[Int[Tensor, " batch"]]:
    """New tokens, one of every sample at a time, as soon as they are drawn.

    Args:
        decode: `LongNetLM.decode`, which gives the logits after a token.
        logits, cache: from `LongNetLM.prefill`.
        draw: `sample` with its options.
        stop_token: a sample that draws it repeats it from then on; the stream ends once all samples have drawn it.
        mesh: the ranks that do the same, and take the tokens that the first one draws.
    """
    stopped = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    for i in range(max_new_tokens):
        chosen = draw(logits)
        if mesh is not None:
            chosen = from_rank(0, chosen, mesh)
        if stop_token is not None:
            chosen = chosen.masked_fill(stopped, stop_token)
            stopped |= chosen == stop_token
        yield chosen
        if i + 1 == max_new_tokens or (stop_token is not None and bool(stopped.all())):
            return
        logits = decode(chosen, cache)
