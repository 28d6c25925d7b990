"""Signatures and state_dict keys of the public modules, as stored in signatures.json.

They change only on purpose: `python tests/test_signatures.py` writes the file anew, and its diff is then for review.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dilated_attention import BlockLayout, Dilated, integrations, models
from dilated_attention import nn as modules

STORED = Path(__file__).with_name("signatures.json")
PATTERN = Dilated((4, 8), (1, 2))
BRANCHES = {"segment_lengths": [4, 8], "dilation_rates": [1, 2]}
LAYOUT = BlockLayout.local(16, 4, block_size=4)
SHAPE = {"embed_dim": 8, "num_heads": 2}
BLOCK = {**SHAPE, "num_kv_heads": 1, "pattern": PATTERN}
SMALL = {**SHAPE, "num_layers": 1, "pattern": PATTERN, "positions": "xpos"}
TOKENS = models.LongNetConfig(**SMALL, vocab_size=8, sub_ln=True, bias=True, tie_embeddings=False)
VECTORS = models.LongNetConfig(**SMALL, vocab_size=None)
IMAGES = {"image_size": 8, "patch_size": 4, "num_classes": 2, "encoder": VECTORS}

# Constructor arguments of every public module.
MADE: dict[str, list[dict[str, Any]]] = {
    "BlockAttentionMixture": [SHAPE, {**SHAPE, "bias": True}],
    "BlockSparseDilatedAttention": [{"layout": LAYOUT}],
    "BlockSparseRingDilatedAttention": [{"layout": LAYOUT}],
    "BlockSparseRingMultiheadDilatedAttention": [{**SHAPE, "layout": LAYOUT}, {**SHAPE, "layout": LAYOUT, "kdim": 3}],
    "DilatedAttention": [BRANCHES],
    "GigaPathSlideEncoder": [{"config": models.GigaPathConfig(in_chans=4, encoder=VECTORS)}],
    "IndexedAttention": [SHAPE, {**SHAPE, "index_heads": 3, "bias": True}],
    "LongNetAttention": [{"config": TOKENS}],
    "LongNetEncoder": [{"config": TOKENS}, {"config": VECTORS}],
    "LongNetLM": [{"config": TOKENS}],
    "LongViT": [{"config": models.LongViTConfig(**IMAGES)}],
    "MultiheadDilatedAttention": [
        {**SHAPE, **BRANCHES},
        {**SHAPE, **BRANCHES, "bias": False},
        {**SHAPE, **BRANCHES, "vdim": 3},
    ],
    "NeighborhoodAttention": [{**SHAPE, "kernel_size": 3}, {**SHAPE, "kernel_size": 3, "qkv_bias": False}],
    "NeighborhoodAttention1D": [{**SHAPE, "kernel_size": 3}],
    "NeighborhoodAttention2D": [{**SHAPE, "kernel_size": 3}],
    "NeighborhoodAttention3D": [{**SHAPE, "kernel_size": 3}],
    "NativeSparseAttention": [SHAPE, {**SHAPE, "pattern": PATTERN, "bias": True}],
    "RingDilatedAttention": [BRANCHES],
    "SelfAttention": [BLOCK, {**BLOCK, "sub_ln": True, "bias": True}],
    "TransformerBlock": [
        {**BLOCK, "mlp_dim": 4},
        {**BLOCK, "mlp_dim": 4, "sub_ln": True, "bias": True},
    ],
}


def public() -> dict[str, Any]:
    return {
        f"{package.__name__.rpartition('.')[2]}.{name}": getattr(package, name)
        for package in (modules, models, integrations)
        for name in package.__all__
    }


def signatures(value: Any) -> dict[str, str]:
    """Return the signatures of a function, or of a class: its constructor and its own and inherited public methods."""
    found = {"": str(inspect.signature(value))}
    if inspect.isclass(value):
        ours = [kind for kind in reversed(value.__mro__) if kind.__module__.startswith("dilated_attention.")]
        names = {name for kind in ours for name in vars(kind) if not name.startswith("_")}
        for name in sorted(names):
            method = getattr(value, name)
            if callable(method) and not inspect.isclass(method):
                found[name] = str(inspect.signature(method))
    return found


def keys(kind: type[nn.Module]) -> list[list[str]]:
    with torch.device("meta"):
        made = [kind(**arguments) for arguments in MADE[kind.__name__]]
    return [[f"{name} {list(x.shape)}" for name, x in module.state_dict().items()] for module in made]


def is_module(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module) and value is not models.Pretrained


def described() -> dict[str, Any]:
    return {
        "signatures": {name: signatures(value) for name, value in public().items()},
        "keys": {name: keys(value) for name, value in public().items() if is_module(value)},
    }


@pytest.mark.parametrize("name", public())
def test_signatures_are_the_stored_ones(name):
    stored = json.loads(STORED.read_text("utf-8"))["signatures"]
    assert set(stored) == set(public())
    assert signatures(public()[name]) == stored[name]


@pytest.mark.parametrize("name", [name for name, value in public().items() if is_module(value)])
def test_state_dict_keys_are_the_stored_ones(name):
    stored = json.loads(STORED.read_text("utf-8"))["keys"]
    assert keys(public()[name]) == stored[name]


if __name__ == "__main__":
    STORED.write_text(json.dumps(described(), indent=1) + "\n", "utf-8")
