"""Give PyTorch's fused attention operators one signature: a forward that returns (out, lse), and a backward that takes
merged values.

The public `scaled_dot_product_attention` returns no lse. The `aten` operators below it do, and they compute a
gradient from any given (out, lse), which is what the merged backward needs. So they are called directly. q, k, v are
`(batch, heads, seq, head_dim)` views with any strides whose last dimension is dense; k and v have as many heads as q.
Outputs lie in memory as `(batch, seq, heads, head_dim)`.

Where no operator fits, plain products are used, in chunks of bounded memory and in single precision at least: for
few keys on CPU; on CUDA for a mask, float64 or a head_dim that 8 does not divide; and for softcap, dropout and a bias.
The CPU operator has no dropout; those of CUDA draw dropout masks that no other backend or rank could repeat; none
returns the gradient of a bias.

All of them multiply a hidden key by a weight of 0, and 0 times NaN or infinity is NaN. So on CPU, a result that is not
finite is computed again from finite numbers (`_forward_of_finite`, `_backward_of_finite`). On an accelerator, to ask
whether it is finite would wait for the device in every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from dilated_attention import torch_internals
from dilated_attention.backends.dropout import factor, survives, threshold
from dilated_attention.bias import Added
from dilated_attention.merge import running
from dilated_attention.scores import Scores
from dilated_attention.torch_internals import constant_when_traced

Queries = Float[Tensor, "batch heads queries dim"]
Keys = Float[Tensor, "batch heads keys dim"]
Statistic = Float[Tensor, "batch heads queries"]
Bias = Float[Tensor, "batch #heads #queries keys"]

_CHUNK = 1 << 18
"""The number of scores per chunk of plain products. Its temporaries, 4 bytes per score each, stay in a cache."""
_CHUNK_OF_ACCELERATORS = 1 << 24
"""The number on accelerators, where every chunk costs a dozen kernel launches: 64 MiB per temporary. Not measured."""


class Pairs(NamedTuple):
    """Hold the hash words of dropout (`dropout.survives`), two per query and one per key, for independent problems."""

    queries: Int32[Tensor, "problems heads rows 2"]
    keys: Int32[Tensor, "problems key_heads keys"]

    def part(self, problems: slice, heads: slice, rows: slice, keys: slice) -> Pairs:
        key_heads = heads
        if self.keys.shape[1] == 1:
            key_heads = slice(None)
        return Pairs(self.queries[problems, heads, rows], self.keys[problems, key_heads, keys])


class Settings(NamedTuple):
    """Hold the settings of a call: how it computes its score entries.

    Attributes:
        scores: numbers; the scale is positive.
        is_causal: query i sees keys up to i. If True, `bias` has one row for all queries.
        bias: added to scores, 0 or -inf. A row whose every key is masked gives out 0 and lse -inf.
        pairs: the words of these queries and keys if the scores have dropout.
        added: what the bias of the scores adds, if they have one. A backward adds the bias's gradient to its sums.
    """

    scores: Scores
    is_causal: bool = False
    bias: Bias | None = None
    pairs: Pairs | None = None
    added: Added | None = None

    @property
    def plain(self) -> bool:
        """Return whether only plain matrix products can compute such scores: no fused operator of PyTorch can."""
        return bool(self.scores.needs)

    @property
    def hides(self) -> bool:
        """Return whether a query may see fewer keys than there are."""
        return self.is_causal or self.bias is not None

    def part(self, problems: slice, heads: slice, rows: slice, keys: slice) -> Settings:
        """Return these settings for some batch elements (`problems`), heads, query rows and keys."""
        bias = self.bias
        if bias is not None:
            slices = zip((problems, heads, rows), bias.shape, strict=False)
            bias = bias[tuple([x if size > 1 else slice(None) for x, size in slices])][..., keys]
        pairs = self.pairs
        if pairs is not None:
            pairs = pairs.part(problems, heads, rows, keys)
        added = self.added
        if added is not None:
            added = added.part(problems, heads, rows, keys)
        return self._replace(bias=bias, pairs=pairs, added=added)

    def drop(self, p: Tensor) -> Tensor:
        """Apply dropout in place to p, the softmax weights or their gradient, and return it."""
        if self.pairs is None:
            return p
        probability = self.scores.dropout_p
        return p.mul_(survives(*self.pairs, threshold(probability))).mul_(factor(probability))


class Merged(NamedTuple):
    """Hold what a backward starts from: the merged out and lse, and their gradients; dlse None: no gradient on lse."""

    dout: Queries
    dlse: Statistic | None
    out: Queries
    lse: Statistic

    def views(self, view: Callable[[Tensor], Tensor]) -> Merged:
        dlse = self.dlse
        if dlse is not None:
            dlse = view(dlse)
        return Merged(view(self.dout), dlse, view(self.out), view(self.lse))


def bias_of(hidden: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Return -inf where a key is hidden, and 0 elsewhere."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def _kind(q: Tensor, k: Tensor, bias: Tensor | None) -> str:
    """Name the operator of PyTorch that computes a call, or "plain"."""
    if q.device.type == "cpu":
        if k.shape[2] < 16:  # below a vector of keys the operator turns a NaN score into 0
            return "plain"
        return "cpu"

    head_dim = q.shape[-1]
    if q.device.type != "cuda" or bias is not None or q.dtype == torch.float64 or head_dim % 8:
        return "plain"
    capability = _capability(q.device)
    if capability < (8, 0):
        if q.dtype == torch.bfloat16:
            return "plain"
        return "cuda_efficient"
    if q.dtype == torch.float32 or head_dim > 256:
        return "cuda_efficient"
    # PyTorch's sdp_utils.cpp: flash has no backward there.
    if 192 < head_dim <= 224 and ((8, 6) <= capability <= (8, 9) or capability[0] == 12):
        return "cuda_efficient"
    return "cuda_flash"


@constant_when_traced
def _capability(device: torch.device) -> tuple[int, int]:
    return _capability_of(device)


@cache
def _capability_of(device: torch.device) -> tuple[int, int]:
    if torch.version.hip:  # its operators have none of these limits
        return 9, 0
    return torch.cuda.get_device_capability(device)


def forward(settings: Settings, q: Queries, k: Keys, v: Keys) -> tuple[Queries, Statistic]:
    """Return out = softmax(scale q kᵀ + bias) v and its lse, for each (batch, head), with the given
    `settings`."""
    out, lse = _forward(settings, q, k, v)
    if settings.hides and not _is_finite(out):
        return _forward_of_finite(settings, q, k, v)
    return out, lse


def _forward(settings: Settings, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    bias = settings.bias
    kind = _kind(q, k, bias)
    if kind == "plain" or settings.plain:
        return _plain_forward(settings, q, k, v)

    out, lse = _fused_forward(kind, settings, q, k, v)
    if bias is not None:  # the operators disagree about empty rows
        seen = bias == 0
        if settings.is_causal:  # the rows behind the last key see them all
            rows = torch.arange(lse.shape[-1], device=lse.device).clamp(max=seen.shape[-1] - 1)
            seen = seen.squeeze(-2).cumsum(-1)[..., rows] > 0
        else:
            seen = seen.any(-1)
        empty = ~seen.expand(lse.shape)
        lse.masked_fill_(empty, -torch.inf)
        out.masked_fill_(empty.unsqueeze(-1), 0.0)
    return out, lse


def backward(settings: Settings, merged: Merged, q: Queries, k: Keys, v: Keys) -> tuple[Queries, Keys, Keys]:
    """Return (dq, dk, dv) with P = exp(scale q kᵀ + bias - lse) and dS = P (dout vᵀ - sum(dout out) + dlse), and with
    the given `settings`. lse must not be -inf."""
    if settings.added is not None:  # its gradient must be added once
        if settings.hides and not all(map(_is_finite, (merged.dout, merged.out, q, k, v))):
            return _backward_of_finite(settings, merged, q, k, v)
        return _backward(settings, merged, q, k, v)
    gradients = _backward(settings, merged, q, k, v)
    if settings.hides and not all(map(_is_finite, gradients)):
        return _backward_of_finite(settings, merged, q, k, v)
    return gradients


def _backward(settings: Settings, merged: Merged, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if settings.plain or _kind(q, k, settings.bias) == "plain":
        return _plain_backward(settings, merged, q, k, v)
    width = 8 if q.device.type == "cuda" else 1  # the operators of CUDA want a head_dim that 8 divides
    wider = append_column(merged, q, k, v, width)
    gradients = _fused_backward(_kind(*wider[1:3], settings.bias), settings, *wider)
    dq, dk, dv = (x[..., : q.shape[-1]] for x in gradients)
    return dq, dk, dv


def _is_finite(x: Tensor) -> bool:
    """Return whether the sum of x is finite, hence every number; True on accelerators, whose answer is not awaited."""
    return x.device.type != "cpu" or math.isfinite(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)))


def _forward_of_finite(settings: Settings, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `forward` with zeros for what is not finite, and write NaN in the rows that such a number belongs to."""
    bad_q = _bad_rows(q)
    bad_k = _bad_rows(k)
    bad_v = ~v.isfinite()
    tensors = q.masked_fill(bad_q, 0.0), k.masked_fill(bad_k, 0.0), v.masked_fill(bad_v, 0.0)
    out, lse = _forward(settings, *tensors)
    if not _is_finite(out):  # the score of a hidden key overflows: these products replace it, the operators add -inf
        out, lse = _plain_forward(settings, *tensors)

    bad = bad_q | _sees(settings, q, bad_k.expand_as(k))
    lse.masked_fill_(bad[..., 0], torch.nan)
    out.masked_fill_(bad | _sees(settings, q, bad_v), torch.nan)
    return out, lse


def _backward_of_finite(
    settings: Settings, merged: Merged, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `backward` with zeros for what is not finite, and write NaN in the sums that such a number belongs to."""
    bad_keys = _bad_rows(k) | _bad_rows(v)
    bad_p = _bad_rows(q) | _bad_rows(merged.lse.unsqueeze(-1))
    bad = bad_p | _bad_rows(merged.dout) | _bad_rows(merged.out) | _sees(settings, q, bad_keys.expand_as(k))
    if merged.dlse is not None:
        bad = bad | _bad_rows(merged.dlse.unsqueeze(-1))

    part = merged.views(lambda x: x.masked_fill(bad if x.dim() == 4 else bad[..., 0], 0.0))
    tensors = q.masked_fill(bad, 0.0), k.masked_fill(bad_keys, 0.0), v.masked_fill(bad_keys, 0.0)
    gradients = _backward(settings, part, *tensors)
    if not settings.plain and not all(map(_is_finite, gradients)):
        gradients = _plain_backward(settings, part, *tensors)

    dq, dk, dv = gradients
    of_values = bad_p | ~merged.dout.isfinite()
    dq.masked_fill_(bad, torch.nan)
    dk.masked_fill_(_seen(settings, bad.expand_as(q), k), torch.nan)
    dv.masked_fill_(_seen(settings, of_values, k), torch.nan)
    return dq, dk, dv


def _bad_rows(x: Tensor) -> Tensor:
    return ~x.isfinite().all(-1, keepdim=True)


def _sees(settings: Settings, q: Tensor, marked: Tensor) -> Tensor:
    """Return whether a query sees a marked key, per column of `marked`, (batch, heads, keys, head_dim): whether the
    mean of the marks that it sees is positive."""
    marks = marked.to(q.dtype)
    means, _ = _forward(_equal(settings), torch.zeros_like(q), torch.zeros_like(marks), marks)
    return means > 0


def _seen(settings: Settings, marked: Tensor, k: Tensor) -> Tensor:
    """Return whether a marked query sees a key, per column of `marked`, (batch, heads, queries, head_dim): whether the
    sum of the marks of the queries that see it, its dv for weights of 1, is positive."""
    marks = marked.to(k.dtype)
    nothing = torch.zeros_like(marks)
    keys = torch.zeros_like(k)
    lse = torch.zeros_like(marks[..., 0], dtype=torch.promote_types(k.dtype, torch.float32))
    _, _, sums = _backward(_equal(settings), Merged(marks, None, nothing, lse), nothing, keys, keys)
    return sums > 0


def _equal(settings: Settings) -> Settings:
    """Return settings with which every key that is not hidden has the same score."""
    return Settings(Scores(settings.scores.scale), settings.is_causal, settings.bias)


def append_column(merged: Merged, q: Tensor, k: Tensor, v: Tensor, width: int) -> tuple[Merged, Tensor, Tensor, Tensor]:
    """Return inputs for a backward that takes no gradient on lse: unchanged if dlse is None, otherwise wider.

    dout, q, k, v and out get `width` more columns. With q, k, v = 0, out = 1 and dout = -dlse in the first of them,
    sum(dout out) becomes sum(dout out) - dlse, and no product changes.
    """
    if merged.dlse is None:
        return merged, q, k, v
    dout, q, k, v, out = (torch.nn.functional.pad(x, (0, width)) for x in (merged.dout, q, k, v, merged.out))
    out[..., -width] = 1
    dout[..., -width] = -merged.dlse
    return Merged(dout, None, out, merged.lse), q, k, v


def aligned(x: Tensor) -> Tensor:
    """Return x, or a copy if some row of x does not begin at a multiple of 16 bytes.

    The operators of CUDA load 16 bytes at once and check only the last stride; a misaligned address ends the whole CUDA
    context.
    """
    unit = 16 // x.element_size()
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1]
    if x.data_ptr() % 16 == 0 and not any(stride % unit for stride in strides):
        return x
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _fused_forward(kind: str, settings: Settings, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scale = settings.scores.scale
    is_causal = settings.is_causal
    if kind == "cpu":
        bias = settings.bias
        if bias is not None:
            bias = bias.expand(*q.shape[:3], k.shape[2])
        return torch_internals.flash_for_cpu(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)

    q = aligned(q)
    k = aligned(k)
    v = aligned(v)
    if kind == "cuda_flash":
        out, lse = torch_internals.flash(q, k, v, 0.0, is_causal, False, scale=scale)[:2]
        return out, lse
    out, lse = torch_internals.efficient(q, k, v, None, True, 0.0, is_causal, scale=scale)[:2]
    return out, lse[..., : q.shape[2]]  # the operator pads the rows of lse to a multiple of 32


def _fused_backward(
    kind: str, settings: Settings, merged: Merged, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scale = settings.scores.scale
    is_causal = settings.is_causal
    dout, _, out, lse = merged
    if kind == "cpu":
        bias = settings.bias
        if bias is not None:
            bias = bias.expand(*q.shape[:3], k.shape[2])
        return torch_internals.flash_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
        )

    dout, q, k, v, out = (aligned(x) for x in (dout, q, k, v, out))
    # With dropout 0 the generator's state is not read, and without ragged sequences neither are the cumulative lengths.
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    if kind == "cuda_flash":
        queries = q.shape[2]
        keys = k.shape[2]
        return torch_internals.flash_backward(
            dout, q, k, v, out, lse.contiguous(), None, None, queries, keys, 0.0, is_causal, state, state, scale=scale
        )

    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf).contiguous()
    if out.dtype != torch.float32:
        # For its rowsum(dout · out) the kernel takes the rows of out to be heads x head_dim apart, whatever its strides
        # (PyTorch's kernel_backward.h, o_strideM). In single precision the sum is made outside of the kernel.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return torch_internals.efficient_backward(
        dout, q, k, v, None, out, padded, state, state, 0.0, [True, True, True, False], is_causal, scale=scale
    )[:3]


def _plain_forward(settings: Settings, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    chunk = _chunk(q)
    if q[..., 0].numel() * k.shape[2] <= chunk:
        part, lse = _plain_part(settings, q, k, v)
        return part.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse

    out, lse = (x.transpose(1, 2) for x in running(q.transpose(1, 2), covered=True))
    for problems, heads, rows, keys in _chunks(q, k, settings.is_causal, chunk):
        here = (problems, heads, rows)
        there = (problems, heads, keys)
        out[here], lse[here] = _plain_part(settings.part(*here, keys), q[here], k[there], v[there], rows.start)
    return out, lse


def _plain_part(settings: Settings, q: Tensor, k: Tensor, v: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Return out, in single precision at least, and lse by plain products. `first`: the number of q's first query."""
    s, _ = _formed(settings, q, k, first)
    lse = s.logsumexp(-1)
    p = s.sub_(lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
    return settings.drop(p) @ v.to(p.dtype), lse


def _plain_backward(
    settings: Settings, merged: Merged, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dout, dlse, out, lse = merged
    delta = (dout.to(lse.dtype) * out).sum(-1)
    if dlse is not None:
        delta -= dlse
    chunk = _chunk(q)
    if q[..., 0].numel() * k.shape[2] <= chunk:
        return _plain_gradients(settings, dout, delta, q, k, v, lse)

    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    for problems, heads, rows, keys in _chunks(q, k, settings.is_causal, chunk):
        here = (problems, heads, rows)
        there = (problems, heads, keys)
        part_q, part_k, part_v = _plain_gradients(
            settings.part(*here, keys), dout[here], delta[here], q[here], k[there], v[there], lse[here], rows.start
        )
        dq[here] = part_q
        dk[there] += part_k
        dv[there] += part_v
    return dq, dk, dv


def _plain_gradients(
    settings: Settings, dout: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, first: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, in single precision at least. `delta`: rowsum(dout · out) - dlse; `first`: as in
    `_plain_part`."""
    dout, q, k, v = (x.to(lse.dtype) for x in (dout, q, k, v))
    s, slope = _formed(settings, q, k, first)
    p = s.sub_(lse.unsqueeze(-1)).exp_()
    ds = settings.drop(dout @ v.mT).sub_(delta.unsqueeze(-1)).mul_(p)
    if settings.added is not None:
        settings.added.add(ds)
    ds.mul_(settings.scores.scale)
    if slope is not None:
        ds.mul_(slope)
    return ds @ k, ds.mT @ q, settings.drop(p).mT @ dout


def _chunk(q: Tensor) -> int:
    if q.device.type == "cpu":
        return _CHUNK
    return _CHUNK_OF_ACCELERATORS


def _chunks(q: Tensor, k: Tensor, is_causal: bool, chunk: int) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Yield slices (batch, heads, query rows, the keys that these rows see), of at most `chunk` scores if possible."""
    problems, heads, rows, _ = q.shape
    keys = k.shape[2]
    sizes = []
    left = chunk // max(1, keys)
    for length in (rows, heads, problems):  # whole rows of a head first: long matrix products
        sizes.append(max(1, min(length, left)))
        left //= max(1, length)
    some_rows, some_heads, some_problems = sizes

    for problem in range(0, problems, some_problems):
        for head in range(0, heads, some_heads):
            for row in range(0, rows, some_rows):
                stop = min(row + some_rows, rows)
                seen = min(stop, keys) if is_causal else keys
                here = slice(problem, problem + some_problems), slice(head, head + some_heads), slice(row, stop)
                yield *here, slice(0, seen)


def _formed(settings: Settings, q: Tensor, k: Tensor, first: int) -> tuple[Tensor, Tensor | None]:
    """Return the scores of q and k, capped and masked, in single precision at least, and the cap's derivative at each,
    or None without a cap. `first`: as in `_plain_part`."""
    statistic = torch.promote_types(q.dtype, torch.float32)
    scale = settings.scores.scale
    cap = settings.scores.softcap
    s = (q.to(statistic) @ k.to(statistic).mT).mul_(scale)
    slope = None
    if cap:
        s = s.div_(cap).tanh_()
        slope = 1 - s.square()
        s = s * cap
    if settings.added is not None:
        s += settings.added.values(s.dtype)
    if settings.bias is not None:
        s = s.masked_fill(settings.bias != 0, -torch.inf)
    if settings.is_causal:
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu_(1 + first)
        s = s.masked_fill(future, -torch.inf)
    return s, slope
