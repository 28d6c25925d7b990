"""Finite differences through the public function, in float64, on a gradient of out and one of lse."""

from __future__ import annotations

import pytest
import torch

from dilated_attention import dilated_attention

# seq, heads, kv_heads, head_dim; segment lengths, rates, options
SHAPES = {
    "one token": ((1, 1, 1, 2), [4], [1], {}),
    "dense": ((6, 1, 1, 3), [6], [1], {}),
    "causal": ((7, 2, 2, 2), [3], [1], {"is_causal": True}),
    "dilated": ((9, 2, 2, 2), [4, 9], [1, 2], {}),
    "dilated and causal": ((9, 2, 2, 2), [4, 9], [1, 2], {"is_causal": True}),
    "uncovered rows": ((8, 2, 2, 2), [8], [3], {}),
    "rate does not divide segment": ((11, 3, 3, 2), [5, 7], [2, 3], {"is_causal": True}),
    "grouped queries": ((6, 4, 2, 2), [3, 6], [1, 2], {}),
    "head groups": ((8, 3, 3, 2), [4, 8], [1, 2], {"head_groups": True, "is_causal": True}),
    "offset table": ((7, 2, 2, 2), [4, 7], [3, 2], {"offsets": [[2, -1], [0, 1]]}),
    "torchscale": ((7, 3, 3, 2), [4, 5], [1, 3], {"compat": "torchscale"}),
    "padding and scale": ((8, 2, 1, 3), [4, 8], [1, 2], {"scale": 0.3, "key_padding_mask": [[False] * 5 + [True] * 3]}),
    "lengths": ((6, 2, 2, 2), [4], [2], {"lengths": [4]}),
    "packed": ((9, 2, 2, 2), [3, 6], [1, 2], {"cu_seqlens": [0, 2, 9], "is_causal": True}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.thorough if x in ("dense", "causal", "dilated") else ()) for x in SHAPES],
)
def test_gradcheck(name):
    (seq_len, heads, kv_heads, head_dim), segment_lengths, dilation_rates, options = SHAPES[name]
    options = {
        key: torch.tensor(x) if key in ("key_padding_mask", "lengths", "cu_seqlens") else x
        for key, x in options.items()
    }
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, seq_len, h, head_dim, generator=generator, dtype=torch.float64, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    )

    def run(q, k, v):
        out, lse = dilated_attention(
            q, k, v, segment_lengths, dilation_rates, **options, return_lse=True, backend="native"
        )
        return out, lse[lse.isfinite()]

    assert torch.autograd.gradcheck(run, (q, k, v))
