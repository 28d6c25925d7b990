"""Generate text: a cache of the keys and values that later tokens can still see, and sampling.

A token's attention merges partial results over the rows of several buffers, whose sizes do not depend on the length of
the text:

- segments: In a branch of segment length w and rate r, a token at p is seen only by later tokens of its segment
  p // w, and only in the heads whose offset is (p mod w) mod r. There are ceil(w / r) rows per KV head. Row
  (p mod w) // r holds the token at p, and a new segment overwrites the last one.
- ring: In a window the token at p is seen by tokens up to p + before * rate. There are (before + 1) * rate rows, in
  which the token at p overwrites the one that has left the window; p sees the rows of its residue modulo the rate.
- leading: The leading tokens of a window are seen by all later tokens, so each has a row. The ring holds the tokens
  after them.

A layer that selects its keys has a `SelectionCache` for each prompt in place of buffers. It grows with the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from numbers import Real
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dilated_attention import Dilated
from dilated_attention.models.configuration import MOST_TOKENS, LongNetConfig
from dilated_attention.nn import SelectionCache
from dilated_attention.plumbing import (
    Mesh,
    Scores,
    Tables,
    checks,
    fused,
    merge_into,
    progressions,
    summed_over,
    tables_at,
)

# Scale lengths between a position and the origin of xPos before the cached keys move to a nearer origin: keys then
# grow by at most 3.5^4, and a move is needed once per that many tokens.
_DRIFT = 4


HeadRuns = list[slice]
"""Key-value heads, as slices."""


class _Buffer(Protocol):
    """Say which rows of a buffer of keys hold which tokens."""

    @property
    def heads(self) -> HeadRuns:
        """Return all KV heads that the buffer holds, as slices."""

    @property
    def rows(self) -> int:
        """Return the number of rows of the buffer."""

    def step(self, position: int) -> tuple[HeadRuns, int | None, slice]:
        """Return (heads, row, rows) of the token at a position.

        It takes part in these KV heads, is kept in `row` (None: not kept), and sees `rows`, which include its own
        if it is kept.
        """

    def kept(self, length: int) -> Iterator[tuple[HeadRuns, range, int]]:
        """Yield what the buffer holds after the first `length` tokens, as (heads, tokens, row): these heads hold these
        tokens in consecutive rows, the first of them in `row`."""


@dataclass(frozen=True, slots=True)
class _Segments:
    """Describe the buffer of a branch, which keeps the rows of the current segment.

    For a head with offset o, row n holds the segment's token o + n * rate. `by_offset`: for each offset, the KV heads
    that have it; heads that take no part are left out.
    """

    segment: int
    rate: int
    by_offset: dict[int, HeadRuns]

    @property
    def heads(self) -> HeadRuns:
        return list(chain.from_iterable(self.by_offset.values()))

    @property
    def rows(self) -> int:
        return -(-self.segment // self.rate)

    def step(self, position: int) -> tuple[HeadRuns, int | None, slice]:
        row, offset = divmod(position % self.segment, self.rate)
        return self.by_offset.get(offset, []), row, slice(0, row + 1)

    def kept(self, length: int) -> Iterator[tuple[HeadRuns, range, int]]:
        for offset, runs in self.by_offset.items():
            yield runs, range(length - length % self.segment + offset, length, self.rate), 0


@dataclass(frozen=True, slots=True)
class _Ring:
    rows: int
    rate: int
    leading: int
    heads: HeadRuns

    def step(self, position: int) -> tuple[HeadRuns, int | None, slice]:
        number = position - self.leading
        if number < 0:
            return [], None, slice(0, 0)
        seen = slice(number % self.rate, min(number + 1, self.rows), self.rate)
        return self.heads, number % self.rows, seen

    def kept(self, length: int) -> Iterator[tuple[HeadRuns, range, int]]:
        stop = length - self.leading
        first = max(0, stop - self.rows)
        turn = stop - stop % self.rows  # the token of row 0
        for start, end in ((first, min(turn, stop)), (max(first, turn), stop)):
            yield self.heads, range(start + self.leading, end + self.leading), start % self.rows


@dataclass(frozen=True, slots=True)
class _Leading:
    rows: int
    heads: HeadRuns

    def step(self, position: int) -> tuple[HeadRuns, int | None, slice]:
        row = position if position < self.rows else None
        return self.heads, row, slice(0, min(position + 1, self.rows))

    def kept(self, length: int) -> Iterator[tuple[HeadRuns, range, int]]:
        yield self.heads, range(min(length, self.rows)), 0


@dataclass(frozen=True, slots=True)
class _Span:
    """Say where the prompts of some samples lie in k and v, as a layer gets them.

    Attributes:
        samples: the indices of the samples in the cache.
        batch: their indices in k and v.
        start: the index of their token 0 along seq of k and v; below 0 if it lies before this rank's shard.
        length: the number of tokens of each prompt.
        held: the tokens [first, last) of each prompt that k and v hold.
    """

    samples: slice
    batch: slice
    start: int
    length: int
    held: tuple[int, int]


def _buffers(config: LongNetConfig, max_len: int | None) -> list[_Buffer]:
    most = MOST_TOKENS if max_len is None else max_len
    pattern = config.pattern
    if pattern is None:  # dense attention is one segment
        pattern = Dilated((most,), (1,))
    branches = pattern.branches(config.kv_heads)
    every = [slice(0, config.kv_heads, 1)]

    found: list[_Buffer] = []
    for i, (segment, rate, offsets) in enumerate(zip(*branches[:3], strict=True)):
        low = branches.bands[i][0] if branches.bands else None
        if low is None:
            found.append(_Segments(min(segment, most), rate, _heads_by_offset(offsets)))
            continue
        leading = branches.leading[i]
        if leading:
            found.append(_Leading(min(leading, most), every))
        found.append(_Ring(min((1 - low) * rate, most), rate, leading, every))
    return found


def _heads_by_offset(offsets: Sequence[int]) -> dict[int, HeadRuns]:
    """Return the KV heads that have each offset; `offsets` holds one per KV head, -1 for a head that takes no part."""
    found: dict[int, HeadRuns] = {}
    for offset in sorted(set(offsets) - {-1}):
        heads = [head for head, its_offset in enumerate(offsets) if its_offset == offset]
        found[offset] = [
            slice(first, first + (count - 1) * step + 1, step) for first, count, step in progressions(heads)
        ]
    return found


class _Layer:
    """Hold the cached keys and values of one layer, in one pair of tensors per buffer of the cache.

    `buffers` lists (buffer, first, keys, values). The `_Buffer` says which token each row holds; keys and values are
    `(batch, heads, rows, head_dim)`, and index 0 along heads is KV head `first`.
    """

    def __init__(self, cache: KeyValueCache) -> None:
        self.cache = cache
        self.buffers: list[tuple[_Buffer, int, Tensor, Tensor]] = []
        for buffer in cache.buffers:
            first = min(heads.start for heads in buffer.heads)
            stop = max(heads.stop for heads in buffer.heads)
            shape = (cache.batch_size, stop - first, buffer.rows, cache.config.head_dim)
            with torch.inference_mode(False):  # else only inference mode could add to them
                keys, values = (torch.zeros(shape, dtype=cache.dtype, device=cache.device) for _ in range(2))
            self.buffers.append((buffer, first, keys, values))

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for _, _, keys, values in self.buffers)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        if self.cache.spans is None:
            return self._step(q, k, v)
        for span in self.cache.spans:
            self._fill(span, k, v)
        return attend(q, k, v)

    def _fill(self, span: _Span, k: Tensor, v: Tensor) -> None:
        for buffer, first, keys, values in self.buffers:
            for runs, tokens, row in buffer.kept(span.length):
                skipped = max(0, -((tokens.start - span.held[0]) // tokens.step))  # tokens before those that are here
                here = range(tokens.start + skipped * tokens.step, min(tokens.stop, span.held[1]), tokens.step)
                if not here:
                    continue
                read = slice(span.start + here.start, span.start + here.stop, here.step)
                written = slice(row + skipped, row + skipped + len(here))
                for heads in runs:
                    held = _shifted(heads, first)
                    keys[span.samples, held, written] = k[span.batch, read, heads].transpose(1, 2)
                    values[span.samples, held, written] = v[span.batch, read, heads].transpose(1, 2)

    def _step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, _, num_heads, head_dim = q.shape
        kv_heads = k.shape[2]
        dtype = self.cache.dtype
        statistic = torch.promote_types(dtype, torch.float32)
        settings = fused.Settings(Scores(head_dim**-0.5))
        grouped = q.to(dtype).reshape(batch, kv_heads, num_heads // kv_heads, head_dim)
        out = torch.zeros_like(grouped)
        lse = grouped.new_full(grouped.shape[:3], -torch.inf, dtype=statistic)
        for samples, position in self.cache.runs:
            for buffer, first, keys, values in self.buffers:
                runs, row, seen = buffer.step(position)
                for heads in runs:
                    held = _shifted(heads, first)
                    if row is not None:
                        keys[samples, held, row] = k[samples, 0, heads]
                        values[samples, held, row] = v[samples, 0, heads]
                    part, part_lse = fused.forward(
                        settings, grouped[samples, heads], keys[samples, held, seen], values[samples, held, seen]
                    )
                    merge_into(out[samples, heads], lse[samples, heads], part, part_lse.to(statistic))
        return out.view(q.shape).to(q.dtype)


class SelectionMemory:
    """Hold what one layer that selects its keys remembers: a `SelectionCache` for each span of the prompts."""

    def __init__(self, cache: KeyValueCache) -> None:
        self.cache = cache
        self.parts: list[tuple[slice, SelectionCache]] = []

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for _, part in self.parts)

    def __call__(self, x: Tensor, rotary: Tables | None, attend: Callable[..., Tensor]) -> Tensor:
        """Return the attention of these tokens over all tokens so far, shaped like x. `attend` is the layer's module,
        and rotary its tables."""
        if self.cache.spans is None:
            outs = [
                attend(x[samples], _tables(rotary, samples, slice(None)), cache=part) for samples, part in self.parts
            ]
            return torch.cat(outs)
        outs = []
        for span in self.cache.spans:
            part = SelectionCache(croppable=0)
            self.parts.append((span.samples, part))
            tokens = slice(span.start, span.start + span.length)
            outs.append(attend(x[span.batch, tokens], _tables(rotary, span.batch, tokens), cache=part))
        return torch.cat(outs, 1)


def _tables(rotary: Tables | None, samples: slice, tokens: slice) -> Tables | None:
    """Return the rotary tables of some tokens of some samples; None without tables."""
    found = tables_at(rotary, tokens)
    if found is None or found[0].dim() < 4 or len(found[0]) == 1:
        return found
    return tuple(table[samples] for table in found)


def _shifted(heads: slice, first: int) -> slice:
    return slice(heads.start - first, heads.stop - first, heads.step)


class KeyValueCache:
    """Keep the keys and values of earlier tokens that a causal LongNet still needs, for samples of any lengths.

    `LongNetLM.prefill` makes it; `LongNetLM.decode` uses and updates it.

    Attributes:
        positions: the number of tokens of each sample so far.
        max_len: the most tokens that a sample may have; None: any number.
        nbytes: the size of the keys and values in bytes, fixed when the cache is made: 2 * layers * batch * head_dim *
            (bytes per number) * S, where S is the sum of rows * heads over all branches and windows. A branch (w, r)
            has ceil(min(w, max_len) / r) rows; a `Window` has min((before + 1) * rate, max_len) rows, plus `leading`.
            `heads` is all KV heads, or those that take part in the branch (head groups, or an offset of -1). With
            `config.selection` it grows with the tokens, see `nn.SelectionCache`.

    Examples:
        >>> from dilated_attention.models import LongNetConfig, LongNetLM
        >>> model, tokens = LongNetLM(LongNetConfig(embed_dim=32, num_layers=1)).eval(), torch.randint(256, (1, 10))
        >>> logits, cache = model.prefill(tokens[:, :9])
        >>> logits = model.decode(tokens[:, 9], cache)
        >>> torch.allclose(logits, model(tokens)[:, -1], atol=1e-5)
        True
        >>> list(cache.positions)
        [10]
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
        selects = config.selection is not None
        if config.pattern is None and max_len is None and not selects:
            raise ValueError("max_len=None: dense attention sees every earlier token; give the length to make room for")
        if max_len is not None:
            max_len = checks.positive("max_len", max_len)
        self.config = config
        self.batch_size = batch_size
        self.max_len = max_len
        self.dtype = dtype
        self.device = torch.device(device)
        self.positions = [0] * batch_size
        self.buffers = [] if selects else _buffers(config, max_len)
        self.spans: list[_Span] | None = None
        self.origins = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        kind = SelectionMemory if selects else _Layer
        self.layers: list[Any] = [kind(self) for _ in range(config.num_layers)]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def _buffered(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and the values of every buffer of every layer."""
        for layer in self.layers:
            for _, _, keys, values in layer.buffers:
                yield keys, values

    @property
    def runs(self) -> Iterator[tuple[slice, int]]:
        """Yield (samples, position) for each run of neighbouring samples that are at the same position."""
        start = 0
        for position, group in groupby(self.positions):
            count = len(list(group))
            yield slice(start, start + count), position
            start += count

    def begin(self, lengths: Sequence[int], *, packed: bool = False, shard: tuple[int, int] | None = None) -> None:
        """Prepare for the first call of the layers, which passes the prompts of all samples.

        lengths: the number of tokens of each prompt. The layers get them as (batch, seq), all of one length; or
        `packed`, one after another; or as this rank's `shard`, the tokens [start, stop) of each.
        """
        self._check(max(lengths))
        if packed:
            self.spans = []
            start = 0
            for i, n in enumerate(lengths):
                self.spans.append(_Span(slice(i, i + 1), slice(0, 1), start, n, (0, n)))
                start += n
        else:
            every = slice(0, self.batch_size)
            held = (0, lengths[0]) if shard is None else shard
            self.spans = [_Span(every, every, -held[0], lengths[0], held)]
        self.origins = torch.tensor([n // 2 for n in lengths], device=self.device)[:, None]  # as in the forward

    def end(self, lengths: Sequence[int]) -> None:
        """Record that the layers have been called: sample i now has `lengths[i]` more tokens."""
        self.spans = None
        self.positions = [a + b for a, b in zip(self.positions, lengths, strict=True)]

    def join(self, mesh: Mesh) -> None:
        """Exchange the rows of the ranks' shards, so that every rank has all of them."""
        summed_over(mesh, list(chain.from_iterable(self._buffered)))  # 0 where others fill

    def step(self) -> Int[Tensor, "batch 1"]:
        """Return the positions of every sample's next token. They advance in `end`, not here.

        In a model with xPos, a position far beyond the origin from which xPos counts would overflow its factors; the
        origin then moves there (see `move`). With `config.selection` it cannot, and a position out of reach raises
        ValueError.
        """
        self._check(max(self.positions) + 1)
        positions = torch.tensor(self.positions, device=self.device)[:, None]
        rotary = self.config.rotary
        if rotary is not None and rotary.scale_base is not None:
            moves = []
            for position, origin in zip(self.positions, self.origins[:, 0].tolist(), strict=True):
                distance = position - origin
                if self.config.selection is not None:
                    rotary.check(distance, self.dtype)
                elif distance > _DRIFT * rotary.scale_base:
                    moves.append(distance)
                    continue
                moves.append(0)
            self.move(moves)
        return positions

    def move(self, distances: Sequence[int]) -> None:
        """Move the origin from which xPos counts, for sample i by `distances[i]` tokens towards later ones, and rescale
        the cached keys."""
        rotary = self.config.rotary
        if rotary is None or rotary.scale_base is None or not any(distances):
            return
        moved = torch.tensor(distances, device=self.device)
        factor = rotary.growth(moved).to(self.device)[:, None]  # batch, 1, 1, head_dim
        for keys, _ in self._buffered:
            keys.copy_(keys.to(torch.promote_types(keys.dtype, torch.float32)) * factor)
        self.origins = self.origins + moved[:, None]

    def _check(self, length: int) -> None:
        if self.max_len is not None and length > self.max_len:
            raise ValueError(f"{length} tokens do not fit a cache of max_len={self.max_len}; make it with a larger one")


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise a ValueError that names the argument that `sample` cannot take, if there is one."""
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
    """Draw one token per row from softmax(logits / temperature), restricted to the most likely tokens and renormalised.

    Args:
        temperature: the sampling temperature; 0 always picks the most likely token.
        top_k: draw from the k most likely tokens, and those as likely as the last of them; None: from all.
        top_p: draw from the smallest set of most likely tokens whose probabilities sum to at least p (nucleus sampling,
            Holtzman et al. 2020, arXiv:1904.09751), after top_k; None: from all.

    Examples:
        >>> from dilated_attention.models import sample
        >>> logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
        >>> sample(logits, temperature=0)  # the most likely token of each row
        tensor([1, 0])
        >>> bool((sample(logits, top_k=2) != torch.tensor([0, 1])).all())  # never the least likely one
        True
    """
    check_sampling(temperature, top_k, top_p)
    logits = logits.float()
    if temperature == 0:
        return logits.argmax(-1)

    # The most likely token is at 0, which no temperature makes infinite.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(logits.dtype).tiny)
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        probabilities = probabilities.masked_fill(beyond.scatter(-1, order, beyond), 0.0)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
