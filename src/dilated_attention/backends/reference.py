"""Compute attention of any pattern from an integer count matrix, in float64. Tests use this as the oracle.

    P_ij = c_ij exp(s_ij) / Z_i,    Z_i = Σ_j c_ij exp(s_ij),    out_i = Σ_j P_ij v_j,    lse_i = log Z_i,

where s_ij = scale · q_i·k_j and c_ij counts how often the pattern shows key j to query i. Everything is a plain
differentiable tensor operation, so autograd gives the gradients, to any order. Time and memory are O(heads · seq²). It
is written from the definition of the patterns and shares no index arithmetic with plans or the other backends, which
are tested against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dilated_attention.backends.attributes import Attributes
from dilated_attention.backends.dropout import survives, threshold
from dilated_attention.backends.facts import Facts
from dilated_attention.bias import Added, Source
from dilated_attention.plan import ALL, WHOLE
from dilated_attention.scores import Scores

MAX_BYTES = 2 * 1024**3  # of a count matrix


def count_matrix(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    table: Sequence[Sequence[int]],
    seq_len: int,
    *,
    is_causal: bool,
    visible: Callable[[int, slice, slice], Bool[Tensor, "#heads rows columns"]] | None = None,
    bands: Sequence[tuple[int | None, int | None]] = (),
    leading: Sequence[int] = (),
    starts: tuple[int, int] = (0, 0),
    num_keys: int | None = None,
) -> Int[Tensor, "heads seq keys"]:
    """Count how many branches show key j to query i, for every head of k and v.

    In a branch (w, r) token p lies in segment p // w and takes part for head h iff (p mod w) mod r = o(h). A
    participating query sees the participating keys of its segment (causal: those at j <= i). With an offset of
    `plan.ALL` every token takes part, and sees those of its own residue. In a branch with a band (low, high), a query
    at p sees only the keys at p + i * r with low <= i <= high. If n tokens are leading, all tokens see them and they
    see all tokens; such a pair counts once.

    Args:
        segment_lengths, dilation_rates: w and r of each branch.
        table: o(h) per branch and head; -1 where the head takes no part in the branch.
        seq_len, num_keys: the number of queries, and of keys (default: as many).
        visible: `visible(n, rows, columns)` returns which of a segment's n participating tokens sees which, for those
            that are queries and those that are keys; default: all see all.
        bands, leading: for each branch; default: no bound and no leading tokens.
        starts: the positions of the first query and of the first key.

    Raises ValueError if the matrix, int32, would exceed 2 GiB.
    """
    num_heads = len(table[0])
    if num_keys is None:
        num_keys = seq_len
    _check_size(1, num_heads, max(seq_len, num_keys))
    position = torch.arange(starts[0], starts[0] + seq_len, device="cpu")
    key = torch.arange(starts[1], starts[1] + num_keys, device="cpu")
    distance = key[None, :] - position[:, None]
    stops = starts[0] + seq_len, starts[1] + num_keys
    end = stops[0] if is_causal else max(stops)
    counts = torch.zeros(num_heads, seq_len, num_keys, dtype=torch.int32, device="cpu")
    for b, (w, r, offsets) in enumerate(zip(segment_lengths, dilation_rates, table, strict=True)):
        segment = position // w
        shown = segment[:, None] == key[None, :] // w
        if bands:
            low, high = bands[b]
            if low is not None:
                shown &= distance >= max(low * r, -WHOLE)
            if high is not None:
                shown &= distance <= min(high * r, WHOLE)

        for h, offset in enumerate(offsets):
            if offset == ALL:
                own = shown & (distance % r == 0)
            else:
                own = shown & ((position % w) % r == offset)[:, None] & ((key % w) % r == offset)[None, :]
            if leading and leading[b]:
                own |= (position < leading[b])[:, None] | (key < leading[b])[None, :]
            if visible is None:
                counts[h] += own
            elif offset >= 0:
                for start in range(max(starts) // w * w, min(stops), w):
                    tokens = range(start + offset, min(start + w, end), r)
                    rows, columns = (_among(tokens, *x) for x in zip(starts, stops, strict=True))
                    if tokens[rows] and tokens[columns]:
                        seen = visible(len(tokens), rows, columns)
                        its_head = h if len(seen) > 1 else 0
                        queries, keys = (
                            slice(tokens[x][0] - first, tokens[x][-1] - first + 1, r)
                            for x, first in zip((rows, columns), starts, strict=True)
                        )
                        counts[h, queries, keys] += seen[its_head]
    if is_causal:
        counts *= distance <= 0
    return counts


def _among(tokens: range, start: int, stop: int) -> slice:
    """Return which of `tokens` lie at positions in [start, stop)."""
    before, until = (max(0, -((tokens.start - position) // tokens.step)) for position in (start, stop))
    return slice(before, min(until, len(tokens)))


def phantom_counts(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    table: Sequence[Sequence[int]],
    seq_len: int,
    *,
    is_causal: bool,
) -> Int[Tensor, "heads seq"]:
    """Count the zero keys that `compat="torchscale"` shows to each query. Arguments are as for `count_matrix`.

    torchscale pads the sequence to a multiple of w' = min(w, N) and each segment to a multiple of r, and attends the
    padding. A query that takes part in a branch sees the m participating keys of its segment, and also ceil(w'/r) - m
    keys with score 0 and value 0. They lie after every token, so a causal query sees none of them.
    """
    phantoms = torch.zeros(len(table[0]), seq_len, dtype=torch.int32, device="cpu")
    if is_causal or seq_len == 0:
        return phantoms
    position = torch.arange(seq_len, device="cpu")
    for w, r, offsets in zip(segment_lengths, dilation_rates, table, strict=True):
        width = min(w, seq_len)
        for h, offset in enumerate(offsets):
            takes_part = (position % width) % r == offset
            for start in range(0, seq_len, width):
                queries = slice(start, start + width)
                phantoms[h, queries] += takes_part[queries] * (-(-width // r) - takes_part[queries].sum())
    return phantoms


def attend(
    q: Float[Tensor, "batch queries heads head_dim"],
    k: Float[Tensor, "batch keys kv_heads head_dim"],
    v: Float[Tensor, "batch keys kv_heads value_dim"],
    counts: Int[Tensor, "*#samples kv_heads queries keys"],
    scores: Scores,
    *,
    phantoms: Int[Tensor, "*#samples kv_heads queries"] | None = None,
    keep: Bool[Tensor, "batch heads queries keys"] | None = None,
    bias: Float[Tensor, "batch heads queries keys"] | None = None,
) -> tuple[Float[Tensor, "batch queries heads value_dim"], Float[Tensor, "batch queries heads"]]:
    """Compute a softmax over keys counted with multiplicity: P = c exp(s) / Σ c exp(s).

    Args:
        q, k, v: query head h attends with KV head h // (heads / kv_heads).
        counts: c, of any pattern; the batch may be left out.
        scores: how s is made of q·k.
        phantoms: further keys per query with score 0 and value 0.
        keep: which pairs survive dropout after the softmax: out = Σ P keep v / (1 - dropout_p); lse stays.
        bias: added to s; -inf hides a pair.

    Returns:
        out in q's dtype and lse, natural logarithm, in float32 (float64 for float64), both rounded once from float64. A
        query that sees nothing gets out = 0, lse = -inf and passes no gradient. A non-finite number turns what it
        reaches into NaN: one in q its row, one in k the rows that see it, one in v their out, and their gradients.
    """
    kv_heads = k.shape[2]
    cap = scores.softcap
    query, key, value = (x.to(torch.float64) for x in (q, k, v))
    counts = counts.to(q.device)[(None,) * (4 - counts.ndim)]
    if phantoms is not None:
        phantoms = phantoms.to(q.device).expand(counts.shape[:-1])
        counts = torch.cat([counts, phantoms[..., None]], -1)
        key, value = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (key, value))
    counts = counts[:, :, None]
    visible = counts > 0

    # A product with a weight of 0 must not carry NaN where nothing is seen: only finite numbers are multiplied.
    finite_query, finite_key, finite_value = (torch.where(x.isfinite(), x, 0.0) for x in (query, key, value))
    score = scores.scale * torch.einsum("bnhgd,bmhd->bhgnm", finite_query.unflatten(2, (kv_heads, -1)), finite_key)
    if cap:
        score = cap * (score / cap).tanh()
    if bias is not None:  # phantoms have none
        padded = torch.nn.functional.pad(bias, (0, score.shape[-1] - bias.shape[-1]))
        score = score + padded.unflatten(1, (kv_heads, -1))
        visible = visible & (score != -torch.inf)
    nan_query = ~query.isfinite().all(-1).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1)
    nan_key = ~key.isfinite().all(-1).permute(0, 2, 1)
    score = score + torch.where(nan_query[..., None] | nan_key[:, :, None, None], torch.nan, 0.0)
    score = torch.where(visible, score, -torch.inf)
    # A constant shift drops out of P and of lse, so it takes no gradient. The extra column is for calls without keys.
    shift = torch.nn.functional.pad(score.detach(), (0, 1), value=-torch.inf).amax(-1, keepdim=True)
    shift = torch.where(shift.isfinite(), shift, 0.0)
    weight = counts * torch.exp(score - shift)
    total = weight.sum(-1, keepdim=True)
    empty = ~visible.any(-1, keepdim=True)
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, shift + total.log())

    weight = torch.where(visible, weight / total, 0.0)
    if keep is not None:  # phantoms have no value to drop
        kept = torch.nn.functional.pad(keep, (0, weight.shape[-1] - keep.shape[-1]), value=True)
        weight = torch.where(kept.unflatten(1, (kv_heads, -1)), weight / (1 - scores.dropout_p), 0.0)
    out = torch.einsum("bhgnm,bmhd->bnhgd", weight, finite_value)
    nan_seen = torch.einsum("bhgnm,bmhd->bnhgd", visible.double(), (~value.isfinite()).double()) > 0
    out = torch.where(nan_seen, torch.nan, out)
    out = torch.where(empty.squeeze(-1).permute(0, 3, 1, 2)[..., None], 0.0, out)  # no NaN of a cotangent passes

    lse = lse.squeeze(-1).permute(0, 3, 1, 2).flatten(2)
    return out.flatten(2, 3).to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))


def batch_counts(
    batch: int,
    seq_len: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    table: Sequence[Sequence[int]],
    *,
    is_causal: bool,
    compat: str | None = None,
    lengths: Int[Tensor, " batch"] | Sequence[int] | None = None,
    cu_seqlens: Int[Tensor, " samples_plus_one"] | Sequence[int] | None = None,
    key_padding_mask: Bool[Tensor, "batch keys"] | None = None,
    visible: Callable[[int, int, slice, slice], Bool[Tensor, "#heads rows columns"]] | None = None,
    starts: tuple[int, int] = (0, 0),
    num_keys: int | None = None,
    **of_branches: Any,
) -> tuple[Int[Tensor, "batch heads seq keys"], Int[Tensor, "batch heads seq"] | None]:
    """Return `count_matrix` for all samples of a batch, and the zero keys that each query sees too (`phantom_counts`).

    Every sample, packed or not, has its own segments from its own first token. Queries outside every sample see
    nothing. If there are as many keys as queries, no query sees a key outside its sample; otherwise all keys of a batch
    element count for each sample in it.

    Args:
        compat: `"torchscale"` returns the zero keys; otherwise None replaces them.
        lengths, cu_seqlens: as in `attention`.
        key_padding_mask: True at keys that are hidden from every query.
        visible: `visible(i, ...)` returns for sample i what `visible` of `count_matrix` does.
        of_branches: `bands` and `leading` of `count_matrix`, which describes the other arguments too.
    """
    if num_keys is None:
        num_keys = seq_len
    if cu_seqlens is not None:
        bounds = [int(bound) for bound in cu_seqlens]
        samples = [(0, start, stop) for start, stop in pairwise(bounds)]
    elif lengths is not None:
        samples = [(b, 0, int(length)) for b, length in enumerate(lengths)]
    else:
        samples = [(b, 0, seq_len) for b in range(batch)]

    num_heads = len(table[0])
    _check_size(batch, num_heads, max(seq_len, num_keys))
    counts = torch.zeros(batch, num_heads, seq_len, num_keys, dtype=torch.int32, device="cpu")
    phantoms = torch.zeros(batch, num_heads, seq_len, dtype=torch.int32, device="cpu")
    for sample, (b, start, stop) in enumerate(samples):
        rows = slice(start, stop)
        columns = rows if num_keys == seq_len else slice(0, num_keys)
        branches = (segment_lengths, dilation_rates, table, stop - start)
        visible_in_sample = None
        if visible is not None:
            visible_in_sample = partial(visible, sample)
        counts[b, :, rows, columns] = count_matrix(
            *branches, is_causal=is_causal, visible=visible_in_sample, starts=starts,
            num_keys=columns.stop - columns.start, **of_branches,
        )  # fmt: skip
        phantoms[b, :, rows] = phantom_counts(*branches, is_causal=is_causal)
    if key_padding_mask is not None:  # not in place: vmap may map the mask
        counts = counts * ~key_padding_mask.cpu()[:, None, None]
    if compat != "torchscale":
        return counts, None
    return counts, phantoms


def reference_attention(
    q: Float[Tensor, "batch seq heads head_dim"],
    k: Float[Tensor, "batch keys kv_heads head_dim"],
    v: Float[Tensor, "batch keys kv_heads head_dim"],
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    table: Sequence[Sequence[int]],
    scores: Scores | None = None,
    *,
    attributes: Attributes | None = None,
    bias: Source | None = None,
    **of_counts: Any,
) -> tuple[Float[Tensor, "batch seq heads head_dim"], Float[Tensor, "batch seq heads"]]:
    """Compute dilated attention from the definition: out and lse as `attend` returns them.

    Args:
        segment_lengths, dilation_rates, table, of_counts: the arguments of `batch_counts`. Rows that are not computed
            get out = 0 and lse = -inf.
        scores: as for `attend`; default: a scale of 1/√head_dim.
        attributes: hold the hash words if the scores have dropout, and where tokens read the bias.
        bias: what all pairs read of the bias.
    """
    counts, phantoms = batch_counts(
        q.shape[0], q.shape[1], segment_lengths, dilation_rates, table, num_keys=k.shape[1], **of_counts
    )
    keep = None
    if scores is None:
        scores = Scores(q.shape[-1] ** -0.5)
    if scores.dropout_p:
        assert attributes is not None
        keys = attributes.keys["words"].expand(1, *k.shape[1:3]).repeat_interleave(q.shape[2] // k.shape[2], 2)
        keep = survives(attributes.queries["words"].transpose(1, 2), keys.transpose(1, 2), threshold(scores.dropout_p))
    added = None
    if bias is not None:
        assert attributes is not None
        flat = replace(bias, tensor=bias.tensor.double().flatten())
        places = attributes.queries["places"].transpose(1, 2)
        where = [x["where"].transpose(1, 2) for x in (attributes.queries, attributes.keys)]
        added = Added(flat, places, *where).values(torch.float64)
        added = added.expand(len(q), q.shape[2], q.shape[1], k.shape[1])
    return attend(q, k, v, counts, scores, phantoms=phantoms, keep=keep, bias=added)


def refusal(facts: Facts) -> str | None:
    """Return why this backend cannot serve a call, and what would serve it; None if it can."""
    if facts.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return f"lse and gradients have no place in {facts.dtype}; use float32"
    return None


def _check_size(batch: int, num_heads: int, seq_len: int) -> None:
    size = 4 * batch * num_heads * seq_len**2
    if size > MAX_BYTES:
        raise ValueError(
            f"seq_len = {seq_len}: the count matrix of the reference backend, int32 {batch} x {num_heads} x {seq_len} "
            f"x {seq_len}, would take {size / 1024**3:.1f} GiB, more than {MAX_BYTES / 1024**3:.0f} GiB; use "
            f'backend="native" or a shorter sequence'
        )
