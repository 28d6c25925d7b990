"""Every way of computing attention against the oracle: out, lse, dq, dk, dv, with a gradient on out and on lse.

A pattern or a backend is tested by one small class:

    class TestWindow(Conformance):
        seq_len = 37

        def run(self, q, k, v):
            return attention(q, k, v, Window(5), return_lse=True, backend="native")

        def counts(self):
            position = torch.arange(37)
            return ((position[:, None] - position).abs() < 5).expand(self.kv_heads, 37, 37)
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from dilated_attention.backends.attributes import Attributes
from dilated_attention.backends.dropout import key_words, query_words, survives, threshold
from dilated_attention.backends.problem import Problem
from dilated_attention.backends.reference import attend
from dilated_attention.bias import Source
from dilated_attention.layout import BlockLayout
from dilated_attention.plan import Plan, Rows, StridedGroup
from dilated_attention.scores import Scores
from tolerances import TOLERANCE, excess


@lru_cache  # backends keep tables by plan
def causal(plan: Plan) -> Plan:
    """Return the plan of a causal call: its groups that have as many queries as keys see none that comes after."""
    groups = [
        group._replace(high=0, phantoms=0) if group.queries.count == group.keys.count else group
        for group in plan.groups
    ]
    return replace(plan, groups=tuple(groups))


def problem(
    plan: Plan,
    is_causal: bool = False,
    scale: float = 1.0,
    *,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    hidden: Tensor | None = None,
    attributes: Attributes | None = None,
    layouts: dict[int, BlockLayout] | None = None,
    lengths: Tensor | None = None,
    bias: Source | None = None,
) -> Problem:
    """Return the problem of a plan, made causal on request. `hidden`: `(batch, keys)`, in place of attributes."""
    if attributes is None:
        attributes = Attributes({}, {} if hidden is None else {"hidden": hidden[:, :, None]})
    plan = causal(plan) if is_causal else plan
    form = 0.0 if bias is None else float(bias.form)
    return Problem(plan, Scores(scale, softcap, dropout_p, form), attributes, layouts, lengths, bias)


def band_of(group: StridedGroup) -> Tensor:
    """Return which key rows of a segment each of its query rows sees: bool, `(queries, keys)`."""
    distance = torch.arange(group.keys.count) - torch.arange(group.queries.count)[:, None]
    low = -group.queries.count if group.low is None else group.low
    return (distance >= low) & (distance <= (group.keys.count if group.high is None else group.high))


def counts_inside(
    lists: dict[int, BlockLayout],
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    offsets: Sequence[Sequence[int]],
    seq_len: int,
) -> Tensor:
    """Return how often layouts inside the segments of branches show each key, int32 `(heads, seq, seq)`. `lists`: the
    layout for each number of participating tokens."""
    counts = torch.zeros(len(offsets[0]), seq_len, seq_len, dtype=torch.int32)
    for width, rate, row in zip(segment_lengths, dilation_rates, offsets, strict=True):
        for head, offset in enumerate(row):
            for start in range(0, seq_len, width):
                rows = torch.arange(start + offset, min(start + width, seq_len), rate)
                if len(rows):
                    counts[head, rows[:, None], rows] += lists[len(rows)].dense_mask()[0, 0]
    return counts


def layout(
    seq_len: int,
    q_block: int,
    k_block: int,
    is_causal: bool,
    samples: int = 1,
    heads: int = 1,
    density: float = 0.4,
    is_cut: bool = False,
) -> BlockLayout:
    """Return a random layout with rows that see nothing. `is_cut`: two thirds of the blocks have a mask of bits, which
    is random or has an edge."""
    rows, columns = -(-seq_len // q_block), -(-seq_len // k_block)
    blocks = torch.rand(samples, heads, rows, columns) < density
    blocks[0, 0, 0] = False
    if is_cut:
        size = (samples, heads, rows, columns, q_block, k_block)
        some = torch.rand(size) < torch.rand(rows, columns, 1, 1)
        query, key, end = torch.arange(q_block)[:, None], torch.arange(k_block), torch.rand(2, rows, columns, 1, 1)
        edge = (query < end[0] * q_block) ^ (key + query // 2 < 1.5 * end[1] * k_block)
        which = torch.randint(3, size[:4])[..., None, None]
        shown = blocks[..., None, None] & torch.where(which == 0, some, (which == 1) | edge)
        pairs = shown.transpose(3, 4).flatten(4, 5).flatten(2, 3)[..., :seq_len, :seq_len]
        found = BlockLayout.from_mask(pairs, seq_len, (q_block, k_block))
    else:
        found = BlockLayout.from_mask(blocks, seq_len, (q_block, k_block))
    return found.causal() if is_causal else found


def part_of_a_layout(
    q_block: int, k_block: int, is_causal: bool, is_cut: bool = False, seq_len: int = 130
) -> tuple[Plan, BlockLayout, Tensor]:
    """Return a plan whose queries are some rows of a layout (of 130: 37 to 81), its layout, and the counts of 2 heads.

    The queries are every second token (of 100), from token 3 on.
    """
    lists = layout(seq_len, q_block, k_block, is_causal, is_cut=is_cut)
    first, count = 2 * seq_len // 7, 9 * seq_len // 26
    tokens = 2 * count + 10
    counts = torch.zeros(2, tokens, seq_len, dtype=torch.int32)
    counts[:, 3 : 3 + 2 * count : 2] = lists.dense_mask()[0, :, first : first + count].int()
    queries, keys = Rows(3, 2 * count, 1, 2, count), Rows(0, seq_len, 1, 1, seq_len)
    group = StridedGroup(queries, keys, 0, 2, 1, at=(first, 0))
    return Plan(tokens, 2, (group,), covered=False, square=False), lists, counts


PARTS_OF_A_LAYOUT = [(16, 16), (37, 13), (256, 32), (1, 1), (16, 1), (1, 16)]

Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def random_calls(count: int) -> settings:
    """`count` examples, and as many times more as a profile of conftest.py has more than the 50 of `make test`."""
    return settings(max_examples=count * settings().max_examples // 50)


def in_sixteen_threads(work: Callable[[int], object]) -> None:
    """Call `work` with each of the numbers below 16, in a thread of its own; all begin at the same time."""
    start = threading.Barrier(16)

    def begin(number: int) -> None:
        start.wait()
        work(number)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def survivors(q: Tensor, k: Tensor, dropout_p: float, head_offset: int, seed: int) -> Tensor | None:
    """Return which pairs survive in a call that follows `torch.manual_seed(seed)`: bool `(batch, heads, seq, seq)`."""
    if not dropout_p:
        return None
    torch.manual_seed(seed)
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, ())
    queries, keys = torch.arange(q.shape[1]), torch.arange(k.shape[1])[:, None]
    first_head = head_offset * (q.shape[2] // k.shape[2])
    words = query_words(drawn, q.shape[0], q.shape[2], queries, first_head)
    keys = key_words(drawn, keys).expand(1, k.shape[1], q.shape[2])
    return survives(words.transpose(1, 2), keys.transpose(1, 2), threshold(dropout_p))


def evaluate(run: Run, inputs: tuple[Tensor, ...], cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
    """out, lse `(batch, heads, seq)`, dq, dk and dv, from cotangents of out, of lse or of both."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    values = dict(zip(("out", "lse"), run(*leaves), strict=True))
    gradients = torch.autograd.grad(
        [values[name] for name in cotangents], leaves, list(cotangents.values()), materialize_grads=True
    )
    return values | dict(zip(("dq", "dk", "dv"), gradients, strict=True))


Judged = tuple[dict[str, Tensor], dict[str, Tensor]]
_judged: OrderedDict[bytes, Judged] = OrderedDict()


def _once(judge: Callable[[], Judged], *given: object) -> Judged:
    """Return what `judge` does for given values. It is called once for values that are equal: backends, instruction
    sets and tiles get the same calls, and the oracle took more than half of the time of their tests."""
    digest = hashlib.blake2b()
    for x in given:
        if isinstance(x, Tensor):
            digest.update(f"{x.shape} {x.dtype}".encode())
            digest.update(x.detach().cpu().contiguous().numpy())
        else:
            digest.update(f"{x} ".encode())
    key = digest.digest()
    if key not in _judged:
        _judged[key] = judge()
        if len(_judged) > 200:
            _judged.popitem(last=False)
    return _judged[key]


def excesses(
    run: Run,
    inputs: tuple[Tensor, Tensor, Tensor],
    counts: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    phantoms: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    gradient_of: tuple[str, ...] = ("out", "lse"),
    seed: int = 0,
) -> dict[str, float]:
    """The error of each result over its bar, judged on the float64 oracle of the same inputs.

    `counts` has the heads of k, or those of q where the query heads of one key-value head see different keys.
    """
    q, k, v = inputs
    apart = max(1, counts.shape[-3] // k.shape[2])
    options = {"scale": scale, "softcap": softcap, "phantoms": phantoms, "keep": keep, "dropout_p": dropout_p}
    generator = torch.Generator().manual_seed(seed)
    shapes = {"out": (*q.shape[:3], v.shape[3]), "lse": (q.shape[0], q.shape[2], q.shape[1])}
    dtypes = {"out": q.dtype, "lse": torch.promote_types(q.dtype, torch.float32)}
    normal = {name: torch.randn(shapes[name], generator=generator, dtype=torch.float64) for name in gradient_of}
    cotangents = {name: x.to(dtypes[name]) for name, x in normal.items()}

    actual = evaluate(run, inputs, cotangents)
    assert {name: actual[name].dtype for name in dtypes} == dtypes
    doubles = (q.double(), k.double(), v.double())
    cotangents = {name: x.double() for name, x in cotangents.items()}

    def oracle(q, k, v):
        k, v = (x.repeat_interleave(apart, 2) for x in (k, v))
        out, lse = attend(q, k, v, counts, Scores(scale, softcap, dropout_p), phantoms=phantoms, keep=keep)
        return out, lse.transpose(1, 2)

    def judge() -> Judged:
        expected = {name: x.detach() for name, x in evaluate(oracle, doubles, cotangents).items()}
        zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        apart_keys = (x.repeat_interleave(apart, 2) for x in doubles[1:])
        sizes = magnitudes(doubles[0], *apart_keys, counts, *(zeros | cotangents).values(), **options)
        sizes |= {name: sizes[name].unflatten(2, (-1, apart)).sum(3) for name in ("dk", "dv")}
        return expected, {name: sizes[name] for name in expected}

    given = (*doubles, counts, *options.values(), *cotangents, *cotangents.values())
    expected, sizes = _once(judge, *given)
    return {name: excess(actual[name], expected[name], sizes[name], q.dtype) for name in expected}


def magnitudes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor,
    d_out: Tensor,
    d_lse: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    phantoms: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    bias: Tensor | None = None,
) -> dict[str, Tensor]:
    """The size of the terms that out, lse, dq, dk, dv and the gradient of a bias are sums of.

    To first order, an error of ε in every product and sum makes one of ε times this size in the result. With |x| the
    absolute value of a tensor, bars for sizes, and √head_dim for the random walk of the roundings of a dot product,

        s̄ = √head_dim scale |q| |k|        L̄ = 1 + |lse| + Σ P s̄        P̄ = P (s̄ + L̄)        out̄ = P̄ |v|
        dS = P (dP - δ + dlse)   with dP = dout v, δ = dout out
        dS̄ = P̄ |dP - δ + dlse| + P (|dout| |v| + |dout| out̄ + |dlse|)
        dq̄ = scale dS̄ |k|        dk̄ = scale dS̄ᵀ |q|        dv̄ = P̄ᵀ |dout|.

    With dropout, P v, dout v and P dout have the factor K / (1 - p) of each pair, a product more: P̄ + P stands for P̄
    in them, and 2 |dout| |v| for |dout| |v|. With a softcap c, t = tanh(scale q k / c) and its slope f = 1 - t²,

        f s̄ + c |t| stands for s̄,   and   f dS̄ + |dS| (1 + 2 |t| (f s̄ + c |t|) / c) for dS̄ in dq̄ and dk̄.

    A bias b, `(batch, heads, seq, keys)`, adds |b| to s̄ in L̄ and P̄. Its gradient has the size dS̄.
    """
    kv_heads = k.shape[2]
    out, lse = attend(q, k, v, counts, Scores(scale, softcap, dropout_p), phantoms=phantoms, keep=keep, bias=bias)
    added = torch.zeros((), dtype=torch.float64) if bias is None else bias.unflatten(1, (kv_heads, -1))
    kept = 1.0 if keep is None else keep.unflatten(1, (kv_heads, -1)) / (1 - dropout_p)
    # h: KV head, g: query head of it, n: query, m: key, d: head_dim
    q, d_out, out, d_lse = (x.unflatten(2, (kv_heads, -1)) for x in (q, d_out, out, d_lse.transpose(1, 2)))
    lse, d_lse = (x.permute(0, 2, 3, 1)[..., None] for x in (lse.unflatten(2, (kv_heads, -1)), d_lse))
    scores, keys = "bnhgd,bmhd->bhgnm", "bhgnm,bmhd->bnhgd"

    counts = counts[(None,) * (4 - counts.ndim)][:, :, None]
    score = scale * torch.einsum(scores, q, k)
    tangent = (score / softcap).tanh() if softcap else torch.zeros_like(score)
    slope = 1 - tangent.square()
    p = torch.where(counts > 0, counts * ((softcap * tangent if softcap else score) + added - lse).exp(), 0.0)
    ds = (kept * torch.einsum(scores, d_out, v) - (d_out * out).sum(-1).permute(0, 2, 3, 1)[..., None] + d_lse).abs()

    scale = abs(scale)
    q, k, v, d_out, d_lse = (x.abs() for x in (q, k, v, d_out, d_lse))
    tangent = tangent.abs()
    score = slope * q.shape[-1] ** 0.5 * scale * torch.einsum(scores, q, k) + softcap * tangent
    total = score + added.abs()
    lse = 1 + torch.where(lse.isfinite(), lse.abs(), 0.0) + (p * total).sum(-1, keepdim=True)
    p_size = p * (total + lse)
    p_kept, dp = p_size, torch.einsum(scores, d_out, v)
    if keep is not None:
        p_kept, dp = kept * (p_size + p), 2 * kept * dp
    out = torch.einsum(keys, p_kept, v)
    delta = (d_out * out).sum(-1).permute(0, 2, 3, 1)[..., None]
    ds, exact = p_size * ds + p * (dp + delta + d_lse), p * ds
    of_bias = ds.flatten(1, 2)
    if softcap:
        ds = slope * ds + exact * (1 + 2 * tangent * score / softcap)
    return {
        "out": out.flatten(2, 3),
        "lse": lse.squeeze(-1).flatten(1, 2),
        "dq": scale * torch.einsum(keys, ds, k).flatten(2, 3),
        "dk": scale * torch.einsum("bhgnm,bnhgd->bmhd", ds, q),
        "dv": torch.einsum("bhgnm,bnhgd->bmhd", p_kept, d_out),
        "bias": of_bias,
    }


class Conformance:
    """Subclasses set the shape and give `run` and `counts`; values and gradients are then checked in every dtype."""

    batch = 2
    seq_len: int
    heads = 4
    kv_heads = 4
    head_dim = 8
    scale = 8**-0.5

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out as q and lse `(batch, heads, seq)`, by the code under test."""
        raise NotImplementedError

    def counts(self) -> Tensor:
        """Return how often each query sees each key: `(kv_heads, seq, seq)`, or with the batch in front."""
        raise NotImplementedError

    def phantoms(self) -> Tensor | None:
        """Return how many zero keys each query sees: like `counts` without the keys."""
        return None

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(self.batch, self.seq_len, heads, self.head_dim, generator=generator, dtype=torch.float64).to(
                dtype
            )
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        return q, k, v

    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize("gradient_of", [("out",), ("lse",), ("out", "lse")], ids=" and ".join)
    def test_values_and_gradients(self, dtype: torch.dtype, gradient_of: tuple[str, ...]):
        errors = excesses(
            self.run,
            self.inputs(dtype),
            self.counts(),
            scale=self.scale,
            phantoms=self.phantoms(),
            gradient_of=gradient_of,
        )
        assert all(error <= 1 for error in errors.values()), f"errors over their bars: {errors}"

    def test_rows_that_see_nothing(self):
        q, k, v = (x.requires_grad_() for x in self.inputs(torch.float32))
        counts = self.counts()
        counts = counts[(None,) * (4 - counts.ndim)].expand(self.batch, -1, -1, -1)
        empty = (counts == 0).all(-1).repeat_interleave(self.heads // self.kv_heads, 1)
        out, lse = self.run(q, k, v)
        d_q = torch.autograd.grad((out, lse), q, (torch.ones_like(out), torch.ones_like(lse)))[0]
        assert torch.equal(lse == -torch.inf, empty)
        assert (out.transpose(1, 2)[empty] == 0).all()
        assert (d_q.transpose(1, 2)[empty] == 0).all()
        assert not any(x.isnan().any() for x in (out, lse, d_q))
