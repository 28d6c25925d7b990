"""The largest entries of rows, against a stable sort; and that a choice does not depend on what it must not see."""

from __future__ import annotations

import pytest
import torch

from dilated_attention import routing
from dilated_attention.nn import NativeSparseAttention
from dilated_attention.ranking import stable_topk
from dilated_attention.routing import Indexer

INF = torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5, 40), (2, 300), (0, 4), (2, 0)], ids=str)
def test_is_the_head_of_a_stable_sort(shape, dtype):
    torch.manual_seed(0)
    for rows in (
        torch.randn(shape),
        torch.randn(shape).mul(2).round(),  # with ties, and negative zeros
        torch.randn(shape).relu() * 1e-40,  # with zeros and numbers below the least normal one
        torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF])[torch.randint(6, shape)],
    ):
        x = rows.to(dtype)
        values, indices = x.sort(dim=-1, descending=True, stable=True)
        for number in {0, min(1, shape[-1]), shape[-1] // 2, shape[-1]}:
            found = stable_topk(x, number)
            assert torch.equal(found[0], values[..., :number])
            assert torch.equal(found[1], indices[..., :number])


def test_has_the_gradient_of_the_values():
    x = torch.tensor([3.0, 1.0, 3.0, 2.0], requires_grad=True)
    stable_topk(x, 2)[0].sum().backward()
    assert x.grad.tolist() == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("name", "block_size"),
    [("topp", (16, 4)), ("topp", (32, 8)), ("buckets", (16, 16)), ("buckets", (16, 4)), ("topk", (16, 4))],
    ids=str,
)
def test_a_causal_choice_does_not_see_later_tokens(name, block_size, seed):
    """Other tokens from the middle on, which make the longest list of all another one."""
    options = {"block_size": block_size, "is_causal": True}
    select = {
        "topp": lambda q, k: routing.topp_blocks(q, k, 0.6, **options),
        "buckets": lambda q, k: routing.lsh_blocks(q, k, num_hashes=1, num_bits=9, floor=8, **options),
        "topk": lambda q, k: routing.topk_blocks(q, k, 0.3, **options),
    }[name]
    torch.manual_seed(seed)
    q, k = 2 * torch.randn(1, 700, 1, 16), torch.randn(1, 700, 1, 16)
    changed = 350 // block_size[0]
    others = [x.clone() for x in (q, k)]
    for x in others:
        x[:, changed * block_size[0] :] = 3 * torch.randn_like(x[:, changed * block_size[0] :])
    rows = [select(*x).dense_blocks()[:, :, :changed] for x in ((q, k), others)]
    assert torch.equal(*rows)


@pytest.mark.parametrize("heads", [1, 2])
def test_an_indexer_chooses_for_the_newest_token_as_for_all(heads):
    """Most of the earlier tokens have an index of 0 there."""
    torch.manual_seed(0)
    indexer, x = Indexer(16, heads, 8, top_k=12).double(), torch.randn(1, 48, 16, dtype=torch.float64)
    whole = indexer.choose(x)[0]
    for t in range(48):
        newest = indexer.choose(x[:, : t + 1], new=1)[0, 0]
        assert sorted(newest.tolist()) == sorted(whole[t].tolist())[-len(newest) :]


@pytest.mark.parametrize("sharpness", [1.0, 40.0])
def test_native_sparse_attention_of_a_prefix(sharpness):
    """Sharp scores underflow to importances of exactly 0, and pieces of one compressed key tie."""
    torch.manual_seed(0)
    module = NativeSparseAttention(
        16, 4, compress_block=16, compress_stride=2, block_size=2, query_block=2, num_selected=3, local_blocks=1,
        window=9, dtype=torch.float64,
    ).eval()  # fmt: skip
    x = sharpness * torch.randn(1, 90, 16, dtype=torch.float64)
    with torch.no_grad():
        whole = module(x)
        for length in (30, 44, 71):
            torch.testing.assert_close(module(x[:, :length]), whole[:, :length], rtol=1e-9, atol=1e-9)
