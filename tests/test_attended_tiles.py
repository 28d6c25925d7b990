"""`tile_attention` equals the dense attention probabilities, added up, and refuses what it cannot read."""

from __future__ import annotations

import dataclasses

import matplotlib
import numpy as np
import pytest
import torch

from dilated_attention import Dilated, UnsupportedError, attention
from dilated_attention.backends.reference import count_matrix
from dilated_attention.models import (
    GigaPathConfig,
    GigaPathSlideEncoder,
    LongNetConfig,
    LongNetEncoder,
    TileAttention,
    attended_tiles,
    tile_attention,
)

matplotlib.use("Agg")
PATTERN = Dilated((16, 40, 96), (1, 2, 4), "head_block")


def encoder(pattern: Dilated | None = PATTERN, num_kv_heads: int | None = None, **changes) -> GigaPathSlideEncoder:
    longnet = LongNetConfig(
        vocab_size=None, embed_dim=32, num_layers=3, num_heads=4, num_kv_heads=num_kv_heads, pattern=pattern,
        positions=None, sub_ln=True, bias=True, **changes,
    )  # fmt: skip
    model = GigaPathSlideEncoder(GigaPathConfig(in_chans=8, slide_ngrids=32, tile_size=16, encoder=longnet))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval().double()


def slide(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*shape, 8, dtype=torch.float64), torch.randint(512, (*shape, 2))


def dense_weights(model: GigaPathSlideEncoder, x: torch.Tensor, coords: torch.Tensor) -> list[torch.Tensor]:
    """P of each layer, `(heads, tokens, tokens)`, from what the attention receives in the model's forward."""
    found = []

    def keep(module, arguments):
        q, k, _ = module.project(arguments[0])
        config, tokens = model.config.encoder, q.shape[1]
        pattern = config.attention_pattern or Dilated((tokens,), (1,))
        _, lse = attention(q, k, k, pattern, backend="reference", return_lse=True)
        counts = count_matrix(
            pattern.segment_lengths, pattern.dilation_rates, pattern.offset_table(k.shape[2]), tokens, is_causal=False
        )
        ratio = q.shape[2] // k.shape[2]
        scores = q[0].transpose(0, 1) @ k[0].permute(1, 2, 0).repeat_interleave(ratio, 0) * config.head_dim**-0.5
        counts = counts.repeat_interleave(ratio, 0)
        found.append(torch.where(counts > 0, counts * (scores - lse[0, :, :, None]).exp(), 0))

    hooks = [block.attention.register_forward_pre_hook(keep) for block in model.encoder.blocks]
    with torch.no_grad():
        model(x, coords)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("global_pool", [False, True])
@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 75),
        ({"compat": "torchscale"}, 90),
        ({"num_kv_heads": 2}, 40),
        ({"pattern": Dilated((16, 64), (1, 4), head_groups=True)}, 70),
        ({"pattern": None}, 20),
    ],
    ids=["exact", "released", "grouped", "head groups", "dense"],
)
def test_it_equals_the_dense_weights(options, tokens, global_pool, monkeypatch):
    monkeypatch.setattr(attended_tiles, "_ROWS", 16)  # several parts of a file
    model = encoder(**options)
    x, coords = slide(1, tokens)
    found = tile_attention(model, x, coords, global_pool=global_pool)
    layers = dense_weights(model, x, coords)
    embedding = torch.zeros(tokens + 1, dtype=torch.float64)
    embedding[1:] = global_pool / tokens
    embedding[0] = not global_pool
    flow = embedding
    for layer, weights in reversed(list(enumerate(layers))):
        torch.testing.assert_close(found.heads[0, layer], (embedding @ weights)[:, 1:])
        flow = (flow + flow @ weights.mean(0)) / 2
    torch.testing.assert_close(found.rolled_up[0], flow[1:])
    total = float(flow.sum())
    assert total == pytest.approx(1) if "compat" not in options and tokens != 70 else total < 1
    assert found.rolled_up.sum() > 0.01


def test_single_precision():
    model, (x, coords) = encoder(), slide(1, 75)
    exact = tile_attention(model, x, coords)
    found = tile_attention(model.float(), x.float(), coords)
    assert (found.heads - exact.heads).abs().max() < 1e-6
    assert (found.rolled_up - exact.rolled_up).abs().max() < 1e-6


def test_each_slide_of_a_batch_is_as_it_is_alone():
    model, (x, coords) = encoder(), slide(3, 50)
    together = tile_attention(model, x, coords, lengths=[50, 1, 23])
    assert together.lengths == (50, 1, 23)
    for i, count in enumerate(together.lengths):
        alone = tile_attention(model, x[i : i + 1, :count], coords[i : i + 1, :count])
        torch.testing.assert_close(together.heads[i, :, :, :count], alone.heads[0])
        torch.testing.assert_close(together.rolled_up[i, :count], alone.rolled_up[0])
        assert not together.heads[i, :, :, count:].any()
        assert not together.rolled_up[i, count:].any()


def test_the_picture_shows_the_tiles_at_their_places():
    model, (x, coords) = encoder(), slide(2, 40)
    found = tile_attention(model, x, coords, lengths=[40, 30])
    for options, values, title in (
        ({}, found.rolled_up[1, :30], "rolled up over layers"),
        ({"layer": 2}, found.heads[1, 2, :, :30].mean(0), "layer 2, mean over heads"),
        ({"layer": 0, "head": 3}, found.heads[1, 0, 3, :30], "layer 0, head 3"),
    ):
        axes = found.plot(1, **options)
        (tiles,) = axes.collections[:1]
        corners = np.array([path.vertices for path in tiles.get_paths()])
        assert np.array_equal(corners.min(1), coords[1, :30])
        assert np.array_equal(corners.max(1), coords[1, :30] + 16)  # squares of the model's tile_size
        assert np.allclose(tiles.get_array(), 30 * values.float())
        assert axes.get_title() == title
    with pytest.raises(ValueError, match="head=1 needs a layer"):
        found.plot(head=1)
    for name, options in (("slide", {"slide": 9}), ("layer", {"layer": 9}), ("head", {"layer": 0, "head": -9})):
        with pytest.raises(ValueError, match=f"{name}=-?9 does not exist: there are"):
            found.plot(**options)


def test_an_outlier_does_not_darken_the_other_tiles():
    heads, rolled_up = torch.zeros(1, 1, 1, 200), torch.linspace(0.5, 1.5, 200)[None] / 200
    rolled_up[0, 7] = 10.0
    found = TileAttention(heads, rolled_up, torch.arange(400).reshape(1, 200, 2) * 16, (200,), 16)
    axes = found.plot()
    least, most = axes.collections[0].get_clim()
    assert (least, axes.collections[0].colorbar.extend) == (0, "max")
    assert 1.4 < most < 1.6
    axes = TileAttention(heads, rolled_up * 0, found.coords, (200,), 16).plot()  # nothing attended: no division by 0
    axes.figure.canvas.draw()


def test_wrong_input_is_named():
    model, (x, coords) = encoder(), slide(1, 12)
    config = model.config.encoder
    for call, message in (
        (lambda: tile_attention(LongNetEncoder(config), x, coords), "must be a GigaPathSlideEncoder; got LongNetEnc"),
        (lambda: tile_attention(model, x.numpy(), coords), r"x must be a torch.Tensor; got ndarray"),
        (lambda: tile_attention(model, x.tolist(), coords), r"x must be a torch.Tensor; got list"),
        (
            lambda: tile_attention(model, x.half(), coords),
            r"x must have the model's dtype, torch.float64; got torch.fl",
        ),
        (lambda: tile_attention(model, x, coords.tolist()), "coords must be a tensor of integers, .* got list"),
        (lambda: tile_attention(model, x, coords.half()), "coords must be a tensor of integers, .* got torch.float16"),
        (lambda: tile_attention(model, x, coords, lengths=[13]), r"lengths must lie in \[0, 12\]"),
        (lambda: tile_attention(encoder().train(), x, coords), "training mode.*call encoder.eval"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    turned = dataclasses.replace(model.config, encoder=dataclasses.replace(config, positions="rope"))
    with pytest.raises(UnsupportedError, match="without rotary positions"):
        tile_attention(GigaPathSlideEncoder(turned).eval().double(), x, coords)


def test_under_autocast():
    """The channel that holds lse would be rounded, the more tiles the coarser."""
    q, k = torch.randn(2, 200, 4, 9)
    weights, pattern = torch.rand(2, 200), Dilated((64, 256), (1, 4))
    expected = attended_tiles._sums_of_rows(q, k, weights, pattern)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attended_tiles._sums_of_rows(q, k, weights, pattern), expected)


def test_blocks_that_are_compiled():
    model, (x, coords) = encoder(), slide(1, 50)
    expected = tile_attention(model, x, coords)
    for i, block in enumerate(model.encoder.blocks):
        model.encoder.blocks[i] = torch.compile(block, backend="eager")
    assert torch.equal(tile_attention(model, x, coords).heads, expected.heads)
