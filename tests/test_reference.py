"""The oracle against arithmetic done by hand, loops written from the text, and PyTorch's dense attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention.backends import reference
from dilated_attention.backends.reference import attend, batch_counts, count_matrix, phantom_counts, reference_attention
from dilated_attention.scores import Scores
from tolerances import relative_error

# segment lengths, dilation rates, table (branch x KV head), sequence length
CASES = [
    ([4], [1], [[0, 0]], 4),
    ([4], [2], [[0, 1]], 7),
    ([3, 5], [1, 2], [[0, 0], [0, 1]], 11),
    ([5, 7], [3, 2], [[0, 2], [1, -1]], 13),
    ([6, 6], [1, 1], [[0, 0], [0, 0]], 9),
    ([2, 20], [4, 6], [[0, 1], [5, 3]], 9),
    ([8], [3], [[2, 2]], 2),
    ([1], [1], [[0, 0]], 3),
    ([3], [1], [[0, 0]], 1),
]


def make(q_shape: tuple[int, ...], kv_heads: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [q_shape, (*q_shape[:2], kv_heads, q_shape[3]), (*q_shape[:2], kv_heads, q_shape[3])]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def test_counts_of_one_branch_by_hand():
    # Segments of 4 are [0, 4) and [4, 5); head 0 takes every even place of a segment, head 1 every odd one.
    counts = count_matrix([4], [2], [[0, 1]], 5, is_causal=False)
    assert counts.tolist() == [
        [[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]],
        [[0, 0, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]],
    ]


def test_counts_add_over_branches_and_causality_removes_the_future():
    counts = count_matrix([2, 4], [1, 2], [[0], [0]], 4, is_causal=False)
    assert counts.tolist() == [[[2, 1, 1, 0], [1, 1, 0, 0], [1, 0, 2, 1], [0, 0, 1, 1]]]
    causal = count_matrix([2, 4], [1, 2], [[0], [0]], 4, is_causal=True)
    assert causal.tolist() == [[[2, 0, 0, 0], [1, 1, 0, 0], [1, 0, 2, 0], [0, 0, 1, 1]]]


def test_residues_restart_in_every_segment():
    # w = 3, r = 2: places 0, 2 of [0, 3) and of [3, 6) are tokens 0, 2, 3, 5.
    counts = count_matrix([3], [2], [[0]], 6, is_causal=False)
    assert counts[0].diagonal().tolist() == [1, 0, 1, 1, 0, 1]


def test_absent_heads_and_padded_keys_are_not_seen():
    assert count_matrix([4], [2], [[-1, 0]], 4, is_causal=False)[0].sum() == 0
    mask = torch.tensor([[False, True, False]])
    counts, _ = batch_counts(1, 3, [3], [1], [[0]], is_causal=False, key_padding_mask=mask)
    assert counts.tolist() == [[[[1, 0, 1]] * 3]]


def test_one_token_sees_itself():
    q, k, v = make((1, 1, 1, 3), 1)
    out, lse = reference_attention(q, k, v, [8], [1], [[0]], is_causal=True)
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(lse, (q * k).sum(-1) / math.sqrt(3))


def test_two_keys_by_hand():
    # Scores ln 3 and 0, the first key counted twice: weights 6/7 and 1/7, Z = 7.
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64).reshape(1, 2, 1, 1)
    v = torch.tensor([7.0, 14.0], dtype=torch.float64).reshape(1, 2, 1, 1)
    out, lse = attend(q, k, v, torch.tensor([[[2, 1]]]), Scores(1.0))
    torch.testing.assert_close(out.item(), 8.0)
    torch.testing.assert_close(lse.item(), math.log(7.0))
    # Five further keys of score 0 and value 0: Z = 12.
    out, lse = attend(q, k, v, torch.tensor([[[2, 1]]]), Scores(1.0), phantoms=torch.tensor([[5]]))
    torch.testing.assert_close(out.item(), 56 / 12)
    torch.testing.assert_close(lse.item(), math.log(12.0))


def test_a_branch_given_twice_changes_lse_only():
    q, k, v = make((1, 9, 2, 4), 2)
    once = reference_attention(q, k, v, [5], [2], [[0, 1]], is_causal=True)
    twice = reference_attention(q, k, v, [5, 5], [2, 2], [[0, 1]] * 2, is_causal=True)
    torch.testing.assert_close(once[0], twice[0])
    torch.testing.assert_close(once[1] + math.log(2.0), twice[1])


def test_phantoms_by_hand():
    # w' = 4, ceil(4/3) = 2 places a residue; [0, 4) holds residue 0 twice and residue 1 once; [4, 6) each once.
    phantoms = phantom_counts([4], [3], [[0, 1]], 6, is_causal=False)
    assert phantoms.tolist() == [[0, 0, 0, 0, 1, 0], [0, 1, 0, 0, 0, 1]]
    # w' = min(100, 6): nothing is padded but the last place of residue 1 when r = 4.
    assert phantom_counts([100], [4], [[1]], 5, is_causal=False).tolist() == [[0, 1, 0, 0, 0]]
    assert phantom_counts([4], [3], [[0, 1]], 6, is_causal=True).sum() == 0
    assert phantom_counts([4], [3], [[-1, 1]], 6, is_causal=False)[0].sum() == 0


def by_loops(q, k, v, segment_lengths, dilation_rates, table, is_causal, scale, phantom):
    """One query at a time, branch outputs mixed by their softmax denominators (LongNet, equations 9 to 11)."""
    batch, seq_len, heads, _ = q.shape
    out, lse = torch.zeros_like(q), torch.full((batch, seq_len, heads), -math.inf, dtype=q.dtype)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // k.shape[2])
            for i in range(seq_len):
                parts = []
                for w, r, offsets in zip(segment_lengths, dilation_rates, table, strict=True):
                    if i % w % r != offsets[g]:
                        continue
                    start = i - i % w
                    places = [p for p in range(start, start + w) if (p - start) % r == offsets[g]]
                    keys = [p for p in places if p < seq_len and (p <= i or not is_causal)]
                    scores = [
                        scale * math.fsum(x * y for x, y in zip(q[b, i, h], k[b, j, g], strict=True)) for j in keys
                    ]
                    padding = -(-min(w, seq_len) // r) - len(keys) if phantom else 0
                    z = math.fsum(math.exp(s) for s in scores) + padding
                    mean = sum(math.exp(s) / z * v[b, j, g] for s, j in zip(scores, keys, strict=True))
                    parts.append((z, mean))
                if parts:
                    total = math.fsum(z for z, _ in parts)
                    out[b, i, h] = sum(z / total * mean for z, mean in parts)
                    lse[b, i, h] = math.log(total)
    return out, lse


@pytest.mark.parametrize("mode", ["bidirectional", "causal", "torchscale"])
@pytest.mark.parametrize("case", CASES)
def test_equals_loops(case, mode):
    segment_lengths, dilation_rates, table, seq_len = case
    q, k, v = make((1, seq_len, 4, 3), 2)
    is_causal, compat = mode == "causal", "torchscale" if mode == "torchscale" else None
    out, lse = reference_attention(
        q, k, v, segment_lengths, dilation_rates, table, Scores(0.7), is_causal=is_causal, compat=compat
    )
    expected = by_loops(q, k, v, segment_lengths, dilation_rates, table, is_causal, 0.7, compat is not None)
    assert relative_error(out, expected[0]) < 1e-14
    assert relative_error(lse, expected[1]) < 1e-14


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_segment_over_all_is_dense_attention(is_causal):
    q, k, v = (x.requires_grad_() for x in make((2, 17, 4, 8), 2))
    out, _ = reference_attention(q, k, v, [17], [1], [[0, 0]], is_causal=is_causal)
    dense = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=is_causal, enable_gqa=True
    ).transpose(1, 2)
    assert relative_error(out, dense) < 1e-14
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    actual = torch.autograd.grad(out, (q, k, v), weight)
    expected = torch.autograd.grad(dense, (q, k, v), weight)
    for a, e in zip(actual, expected, strict=True):
        assert relative_error(a, e) < 1e-14


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("compat", [None, "torchscale"])
def test_samples_of_a_ragged_batch_are_separate(is_causal, compat):
    q, k, v = make((3, 12, 2, 4), 1)
    pattern = ([5, 12], [1, 3], [[0], [1]])
    lengths = [12, 7, 0]
    options = {"is_causal": is_causal, "compat": compat}
    out, lse = reference_attention(q, k, v, *pattern, lengths=lengths, **options)
    for b, n in enumerate(lengths):
        alone = reference_attention(*(x[b : b + 1, :n] for x in (q, k, v)), *pattern, **options)
        torch.testing.assert_close(out[b, :n], alone[0][0])
        torch.testing.assert_close(lse[b, :n], alone[1][0])
        assert (out[b, n:] == 0).all()
        assert (lse[b, n:] == -torch.inf).all()
    packed = [torch.cat([x[b, :n] for b, n in enumerate(lengths)])[None] for x in (q, k, v)]
    out_packed, lse_packed = reference_attention(*packed, *pattern, cu_seqlens=[0, 12, 19, 19], **options)
    torch.testing.assert_close(out_packed[0], torch.cat([out[b, :n] for b, n in enumerate(lengths)]))
    torch.testing.assert_close(lse_packed[0], torch.cat([lse[b, :n] for b, n in enumerate(lengths)]))


def test_key_padding_mask_equals_shorter_lengths_when_segments_cover_all():
    q, k, v = make((2, 6, 2, 4), 2)
    mask = torch.arange(6) >= torch.tensor([[6], [4]])
    masked = reference_attention(q, k, v, [6], [1], [[0, 0]], is_causal=False, key_padding_mask=mask)
    short = reference_attention(q, k, v, [6], [1], [[0, 0]], is_causal=False, lengths=[6, 4])
    torch.testing.assert_close(masked[0][1, :4], short[0][1, :4])
    torch.testing.assert_close(masked[1][1, :4], short[1][1, :4])
    assert masked[1][1, 4:].isfinite().all()  # a padded token is no key, but still a query


@pytest.mark.parametrize("phantom", [False, True])
def test_gradients_of_first_and_second_order(phantom):
    """Including rows that see nothing, at which nothing is NaN and no gradient passes."""
    q, k, v = (x.requires_grad_() for x in make((1, 7, 2, 2), 1))
    counts = count_matrix([4, 7], [2, 3], [[0], [2]], 7, is_causal=True)
    phantoms = torch.arange(7)[None] % 3 * counts.any(-1) if phantom else None
    rows = counts.any(-1)[0]
    assert not rows.all()

    def covered(q, k, v):
        out, lse = attend(q, k, v, counts, Scores(0.6), phantoms=phantoms)
        return out, lse[:, rows]

    assert torch.autograd.gradcheck(covered, (q, k, v))
    assert torch.autograd.gradgradcheck(covered, (q, k, v))


def test_rows_that_see_nothing():
    q, k, v = (x.requires_grad_() for x in make((1, 6, 1, 2), 1))
    out, lse = reference_attention(q, k, v, [6], [2], [[1]], is_causal=False)
    assert (out[0, ::2] == 0).all()
    assert (lse[0, ::2] == -torch.inf).all()
    gradients = torch.autograd.grad(
        (out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)), create_graph=True
    )
    for gradient in gradients:
        assert (gradient[0, ::2] == 0).all()
        assert (gradient[0, 1::2] != 0).any()
    dout = torch.ones_like(out)
    dout[0, ::2] = torch.nan
    for gradient in torch.autograd.grad(out, (q, k, v), dout, retain_graph=True):
        assert gradient.isfinite().all()
    for second in torch.autograd.grad(sum(g.square().sum() for g in gradients), (q, k, v)):
        assert second.isfinite().all()


def test_no_keys_at_all():
    q, k, v = make((2, 3, 2, 4), 2)
    out, lse = attend(q, k[:, :0], v[:, :0], torch.zeros(2, 3, 0, dtype=torch.int32), Scores(1.0))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_nan_reaches_the_rows_that_see_it_and_no_other(where, number):
    tensors = dict(zip("qkv", make((1, 8, 2, 3), 2), strict=True))
    tensors[where][0, 5, 1] = number
    # Causal segments of 4: token 5 is seen by 5, 6 and 7.
    leaves = [x.requires_grad_() for x in tensors.values()]
    out, lse = reference_attention(*leaves, [4], [1], [[0, 0]], is_causal=True)
    rows = [5] if where == "q" else [5, 6, 7]
    others = [i for i in range(8) if i not in rows]
    assert out[0, rows, 1].isnan().all() if where != "v" else out[0, rows, 1, 0].isnan().all()
    assert lse[0, rows, 1].isnan().all() or where == "v"
    assert out[0, others, 1].isfinite().all()
    assert out[0, :, 0].isfinite().all()
    assert lse[0, others].isfinite().all()
    for gradient in torch.autograd.grad((out.sum(), lse.sum()), leaves):
        assert gradient[0, :4].isfinite().all()
        assert gradient[0, :, 0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype):
    q, k, v = (x.to(dtype) for x in make((1, 5, 2, 4), 1))
    out, lse = reference_attention(q, k, v, [5], [1], [[0]], is_causal=True)
    expected = reference_attention(q.double(), k.double(), v.double(), [5], [1], [[0]], is_causal=True)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(out, expected[0].to(dtype))
    assert torch.equal(lse, expected[1].to(lse.dtype))


def test_large_scores_do_not_overflow():
    q, k, v = make((1, 6, 1, 2), 1)
    out, lse = reference_attention(1e3 * q, 1e3 * k, v, [6], [1], [[0]], Scores(1.0), is_causal=False)
    assert out.isfinite().all()
    score = 1e6 * torch.einsum("bnhd,bmhd->bnm", q, k)
    torch.testing.assert_close(lse[..., 0], score.logsumexp(-1))


def test_empty_batch_keeps_the_graph():
    q, k, v = (x.requires_grad_() for x in make((0, 5, 2, 4), 1))
    out, lse = reference_attention(q, k, v, [4], [1], [[0]], is_causal=True)
    assert (out.shape, lse.shape) == ((0, 5, 2, 4), (0, 5, 2))
    assert [g.shape for g in torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


def test_counts_may_differ_between_samples():
    q, k, v = make((2, 4, 2, 3), 1)
    counts = torch.stack([count_matrix([4], [1], [[0]], 4, is_causal=causal) for causal in (False, True)])
    out, lse = attend(q, k, v, counts, Scores(1.0))
    for b in range(2):
        alone = attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], counts[b], Scores(1.0))
        torch.testing.assert_close(out[b : b + 1], alone[0])
        torch.testing.assert_close(lse[b : b + 1], alone[1])


def test_too_large_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"seq_len = 100000: .* 74.5 GiB.*shorter sequence"):
        count_matrix([4], [1], [[0, 0]], 100_000, is_causal=False)
    monkeypatch.setattr(reference, "MAX_BYTES", 4 * 2 * 10 * 10 - 1)
    q, k, v = make((2, 10, 1, 4), 1)
    with pytest.raises(ValueError, match="seq_len = 10"):
        reference_attention(q, k, v, [4], [1], [[0]], is_causal=False)
