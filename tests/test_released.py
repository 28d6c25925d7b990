"""The rival of the benchmarks is what it says: recorded outputs of the released code."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_lab import released
from test_checkpoints import ENCODERS, GIGAPATH, MODULES, Golden, close, recorded


def options(golden, **changes):
    heads = golden.options["num_heads"]
    return released.Attention(heads, golden.meta["segment_length"], golden.meta["dilated_ratio"], **changes)


@pytest.mark.parametrize("name", MODULES)
def test_attention(name):
    golden = Golden(name)
    held = options(golden, is_causal=golden.meta["is_causal"], xpos=golden.meta["xpos"])
    close(released.attention(golden.weights, "", golden["x"], held), golden["out"])


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name):
    golden = Golden(name)
    close(released.stack(golden.weights, "", golden["x"], options(golden)), golden["out"])


def test_decoder():
    golden = Golden("ts_longnet_decoder_xpos")
    x = golden.weights["embed_tokens.weight"][golden["tokens"]]
    states = released.stack(golden.weights, "", x, options(golden, is_causal=True, xpos=True))
    close(states @ golden.weights["output_projection.weight"].T, golden["logits"])


def test_gigapath():
    golden = Golden(GIGAPATH)
    places = torch.floor(golden["coords"] / 256).long()
    sines = golden["pos_embed"][0, places[..., 0] * 16 + places[..., 1] + 1]
    close(released.gigapath(golden.weights, golden["x"], sines, options(golden)), golden["cls_out"])


@pytest.mark.parametrize("name", ["ts_core_b_3_h5", "ts_core_c_3_ragged", "ts_core_f_no_rate1", "ts_core_i_r_gt_h"])
def test_core_quirks_included(name):
    meta, arrays = recorded(name)
    branches = [meta[key] for key in meta if key.startswith(("segment", "dilat"))]
    held = released.Attention(arrays["q"].shape[2], *branches)
    close(released.dilated(*(arrays[x] for x in "qkv"), held), arrays["out_c0"].flatten(2))
