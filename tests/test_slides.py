"""The slide encoder: ragged slides, places on the grid, pooling, files."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

from dilated_attention.models import GigaPathConfig, GigaPathSlideEncoder, LongViT, LongViTConfig
from dilated_attention.nn import grid_sines
from dilated_attention.patterns import Dilated

ENCODER = dataclasses.replace(
    GigaPathConfig().encoder, embed_dim=32, num_layers=2, num_heads=4, pattern=Dilated((16, 64), (1, 4))
)
SMALL = GigaPathConfig(in_chans=12, slide_ngrids=40, encoder=ENCODER)


def slides(tiles=90, count=4):
    return torch.randn(count, tiles, 12), torch.randint(40 * 256, (count, tiles, 2))


@pytest.mark.parametrize("compat", ["torchscale", None])
@pytest.mark.parametrize("global_pool", [False, True])
def test_a_ragged_batch_is_each_slide_alone(compat, global_pool):
    encoder = dataclasses.replace(ENCODER, compat=compat)
    model = GigaPathSlideEncoder(dataclasses.replace(SMALL, global_pool=global_pool, encoder=encoder)).eval()
    x, coords = slides()
    lengths = [90, 1, 37, 64]
    with torch.no_grad():
        ragged = model(x, coords, lengths=lengths)
        layers = model(x, coords, lengths=torch.tensor(lengths), all_layers=True)
        for i, length in enumerate(lengths):
            one = x[i : i + 1, :length], coords[i : i + 1, :length]
            assert (model(*one)[0] - ragged[i]).abs().max() <= 1e-5
            assert (model(*one, all_layers=True)[:, 0] - layers[:, i]).abs().max() <= 1e-5
        x[1, 1:], coords[1, 1:] = torch.nan, -5  # padding: neither read nor checked
        assert torch.equal(model(x, coords, lengths=lengths), ragged)


@pytest.mark.parametrize("compat", ["torchscale", None])
@pytest.mark.parametrize("counts", [[91, 2, 38, 65], [40, 40]])
def test_the_cls_token_alone_is_that_of_all_tokens(counts, compat):
    """If only cls tokens are needed, the last layer computes nothing else; the gradients are equal too."""
    model = GigaPathSlideEncoder(dataclasses.replace(SMALL, encoder=dataclasses.replace(ENCODER, compat=compat)))
    model = model.double()
    x, starts = torch.randn(1, sum(counts), 32).double(), [sum(counts[:i]) for i in range(len(counts))]
    results = []
    for first_only in (False, True):
        leaf = x.clone().requires_grad_()
        state = model.encoder(leaf, cu_seqlens=[*starts, sum(counts)], first_only=first_only)
        state = state if first_only else state[:, starts]
        model.zero_grad()
        state.square().sum().backward()
        results.append([state, leaf.grad, *(p.grad for p in model.encoder.parameters())])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="each sample must have a first token; got samples of"):
        model.encoder(x, cu_seqlens=[0, *starts, sum(counts)], first_only=True)  # the first sample is empty


def test_dropout_acts_on_the_cls_token():
    encoder = dataclasses.replace(ENCODER, attention_dropout=0.5)
    model = GigaPathSlideEncoder(dataclasses.replace(SMALL, encoder=encoder))
    x, coords = slides(20, 1)
    assert not torch.equal(model(x, coords), model(x, coords))
    assert torch.equal(model.eval()(x, coords), model(x, coords))


def test_a_slide_s_places_matter_and_its_order_only_through_segments():
    encoder = dataclasses.replace(ENCODER, pattern=Dilated((128,), (1,)))
    model = GigaPathSlideEncoder(dataclasses.replace(SMALL, encoder=encoder)).double().eval()
    x, coords = slides(50, 1)
    x, order = x.double(), torch.randperm(50)
    out = model(x, coords)
    torch.testing.assert_close(model(x[:, order], coords[:, order]), out)
    assert (model(x, coords.flip(-1)) - out).abs().max() > 1e-6
    torch.testing.assert_close(model(x, coords // 256 * 256 + 255.0), out)  # anywhere within a place


@pytest.mark.parametrize("dtype", [torch.uint32, torch.int64, torch.float64])
def test_pixels_that_single_precision_rounds(dtype):
    model = GigaPathSlideEncoder(dataclasses.replace(SMALL, slide_ngrids=70_000)).eval()
    x, start = torch.randn(1, 1, 12), 65_536 * 256
    first, last, behind = (
        model(x, torch.tensor([[[pixel, 0]]], dtype=dtype)) for pixel in (start, start + 255, start + 256)
    )
    assert torch.equal(first, last)
    assert not torch.equal(first, behind)


@pytest.mark.parametrize("point", [[-1, 0], [0, 40 * 256], [float("nan"), 0], [1e12, 0]])
def test_coords_outside_the_grid(point):
    x, coords = slides()
    coords = coords.float()
    coords[2, 7] = torch.tensor(point)
    with pytest.raises(
        ValueError, match=r"coords must be pixels in \[0, 10,240\), 40 places of 256; .* slide 2, tile 7"
    ):
        GigaPathSlideEncoder(SMALL)(x, coords)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([[0, -1]], r"points of a grid of 4 x 4 must lie in \[0, 4\); got -1"),
        ([[4, 0]], r"points of a grid of 4 x 4 must lie in \[0, 4\); got 4"),
        ([[0, 1, 2]], r"points must be integers \(..., 2\); got torch.int64 of shape \(1, 3\)"),
        ([[0.0, 1.0]], r"points must be integers \(..., 2\); got torch.float32"),
    ],
)
def test_points_that_are_none_of_a_grid(points, message, unchecked):
    with pytest.raises(ValueError, match=message):
        grid_sines(torch.tensor(points), 4, 8)


def test_points_of_any_integers():
    points = torch.tensor([[0, 3], [2, 1]])
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(grid_sines(points.to(dtype), 4, 8), grid_sines(points, 4, 8))


@pytest.mark.filterwarnings("ignore:input of shape")
def test_wrong_slides():
    model = GigaPathSlideEncoder(SMALL)
    x, coords = slides()
    for wrong, message in (
        ((x[0], coords), r"x must be \(batch, tiles, in_chans=12\); got shape \(90, 12\)"),
        ((x[..., :11], coords), "in_chans=12"),
        ((x, coords[:, :80]), r"coords must be \(batch, tiles, 2\) = \(4, 90, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model(*wrong)
    with pytest.raises(ValueError, match="a slide without tiles has no mean"):
        model(x, coords, lengths=[90, 90, 0, 90], global_pool=True)
    assert model(x, coords, lengths=[90, 90, 0, 90]).isfinite().all()  # its cls token alone


@pytest.mark.parametrize("positions", [None, "rope"])
def test_no_slides(positions):
    encoder = dataclasses.replace(ENCODER, positions=positions)
    model = GigaPathSlideEncoder(dataclasses.replace(SMALL, encoder=encoder))
    x, coords = slides(5, 0)
    for lengths in (None, []):
        for pool in (False, True):
            assert model(x, coords, lengths=lengths, global_pool=pool).shape == (0, 32)
            assert model(x, coords, lengths=lengths, global_pool=pool, all_layers=True).shape == (3, 0, 32)
        assert [states.shape for states in model.tokens(x, coords, lengths=lengths)] == [(0, 6, 32)]
        with torch.no_grad():
            assert model(x, coords, lengths=lengths).shape == (0, 32)
    model(x, coords).sum().backward()
    assert LongViT(LongViTConfig(image_size=64, encoder=ENCODER))(torch.zeros(0, 3, 64, 64)).shape == (0, 4, 32)


def test_shapes_on_the_meta_device():
    model = LongViT.empty(LongViTConfig(image_size=64, encoder=ENCODER, num_classes=7))
    assert model(torch.empty(2, 3, 64, 64, device="meta")).shape == (2, 7)
    slides = GigaPathSlideEncoder.empty(GigaPathConfig(in_chans=6, encoder=ENCODER))
    tiles, coords = torch.empty(2, 9, 6, device="meta"), torch.empty(2, 9, 2, device="meta")
    for global_pool in (False, True):
        assert slides(tiles, coords, global_pool=global_pool).shape == (2, 32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    """A model in float32 refuses it, with a remedy, unless autocast is on. A model in half precision takes it."""
    model = GigaPathSlideEncoder(SMALL).eval()
    x, coords = slides(20, 2)
    message = f"x must have the model's dtype, torch.float32; got {dtype}: pass x.to\\(torch.float32\\)"
    with pytest.raises(ValueError, match=message):
        model(x.to(dtype), coords)
    with pytest.raises(ValueError, match=f"coords must be a tensor of integers, .* got {dtype}"):
        model(x, coords.to(dtype))
    vit = LongViT(LongViTConfig(image_size=64, encoder=ENCODER))
    with pytest.raises(ValueError, match=f"images must have the model's dtype, torch.float32; got {dtype}"):
        vit(torch.randn(1, 3, 64, 64, dtype=dtype))
    expected = model(x, coords)
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(x.to(dtype), coords) - expected).abs().max() < 0.1 * expected.abs().max()
    half = model.to(dtype)(x.to(dtype), coords)
    assert half.dtype == dtype
    assert (half - expected).abs().max() < 0.1 * expected.abs().max()


def test_numpy_and_integers():
    model = GigaPathSlideEncoder(SMALL)
    x, coords = slides(20, 2)
    with pytest.raises(ValueError, match=r"x must be a torch.Tensor; got ndarray: pass torch.as_tensor\(x\)"):
        model(x.numpy(), coords)
    with pytest.raises(ValueError, match=r"x must have the model's dtype, torch.float32; got torch.int64"):
        model(x.long(), coords)
    with pytest.raises(ValueError, match=r"coords must be a tensor of integers, .* got ndarray"):
        model.tokens(x, coords.numpy())
    with pytest.raises(ValueError, match=r"images must be a torch.Tensor; got ndarray"):
        LongViT(LongViTConfig(image_size=64, encoder=ENCODER))(torch.randn(1, 3, 64, 64).numpy())


def test_an_adapter_may_take_the_place_of_the_first_layer():
    """A module without a weight, as after `torch.ao.quantization.quantize_dynamic`."""
    model, vit = GigaPathSlideEncoder(SMALL), LongViT(LongViTConfig(image_size=64, encoder=ENCODER))
    inputs, images = slides(20, 2), torch.randn(1, 3, 64, 64)
    before = model(*inputs), vit(images)
    model.projection, vit.patches = nn.Sequential(model.projection), nn.Sequential(vit.patches)
    assert torch.equal(model(*inputs), before[0])
    assert torch.equal(vit(images), before[1])


def test_tiles_first_is_warned_of():
    x, coords = slides(300, 1)
    with pytest.warns(UserWarning, match=r"\(300, 1, 12\) is read as \(batch, seq, ...\)"):
        GigaPathSlideEncoder(SMALL)(x.transpose(0, 1), coords.transpose(0, 1))


def test_published_shapes():
    config = GigaPathConfig.preset("gigapath-12l768d")
    assert config == GigaPathConfig()
    assert config.encoder.pattern.segment_lengths == (1024, 5792, 32768, 185363, 1048576)
    model = GigaPathSlideEncoder.empty(config)
    assert sum(p.numel() for p in model.parameters()) == 86_330_880
    assert GigaPathConfig.preset("gigapath-24l1024d", in_chans=8).encoder.num_layers == 24
    assert LongViTConfig.preset("longvit-small-4096").encoder.pattern.segment_lengths[-1] == 16384


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_chans": 0}, "in_chans=0"),
        ({"global_pool": "mean"}, "global_pool must be a bool; got 'mean'"),
        ({"encoder": {}}, "encoder={}: must be a LongNetConfig"),
        ({"encoder": dataclasses.replace(ENCODER, vocab_size=5)}, "must take vectors"),
        ({"encoder": dataclasses.replace(ENCODER, embed_dim=6, num_heads=2)}, "multiple of 4 channels"),
    ],
)
def test_wrong_configuration(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)
    with pytest.raises(ValueError, match="image_size=1000: must be a multiple of patch_size=32"):
        LongViTConfig(image_size=1000)


@pytest.mark.parametrize("kind", [GigaPathSlideEncoder, LongViT])
def test_saved_and_loaded(kind, tmp_path):
    config = SMALL if kind is GigaPathSlideEncoder else LongViTConfig(image_size=64, num_classes=3, encoder=ENCODER)
    model = kind(config).eval()
    model.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path)
    assert loaded.config == config
    inputs = slides() if kind is GigaPathSlideEncoder else (torch.randn(2, 3, 64, 64),)
    assert torch.equal(loaded(*inputs), model(*inputs))
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["encoder"]["pattern"]["segment_lengths"] = [4, "x"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "SHA256SUMS").unlink()
    with pytest.raises(
        ValueError, match="configuration: encoder: pattern: segment_lengths must hold positive integers"
    ):
        kind.from_pretrained(tmp_path)


def test_fine_tuning_reaches_every_parameter():
    model = GigaPathSlideEncoder(SMALL).double()
    x, coords = slides()
    model(x.double(), coords, lengths=[90, 5, 30, 64]).sin().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_coordinates_in_another_unit_are_told():
    """Fractions, or numbers of the grid: all tiles would lie at a few places."""
    model, (x, coords) = GigaPathSlideEncoder(SMALL).eval(), slides(count=2)
    for wrong in (coords / coords.max(), coords // 2560):
        mixed = torch.stack([coords[0].double(), wrong[1].double()])
        with pytest.warns(UserWarning, match=r"coords: the 90 tiles of slide 1 lie at \d+ places of 256 pixels"):
            model(x, mixed)
    model(x, coords)


@pytest.mark.parametrize(
    ("step", "factor"), [(512, "0.5"), (515.4, "0.497"), (128.0, "2"), (129.28, "1.98"), (224, "1.14")]
)
def test_coordinates_of_another_resolution_are_told(step, factor):
    """Pixels of a slide at 40x, micrometres, and tiles of another size; the remedy gives the embedding."""
    model, (x, _) = GigaPathSlideEncoder(SMALL).eval(), slides(count=2)
    grid = torch.cartesian_prod(torch.arange(10), torch.arange(9))
    right, wrong = (torch.stack([grid * 256, (grid * side + 7).round().long()]) for side in (256, step))
    with pytest.warns(UserWarning, match=rf"slide 1 lie {round(step)} apart, not 256 .* multiply them by {factor}[;]"):
        found = model(x, wrong)
    assert (found - model(x, right)).abs().max() > 1e-3
    with torch.no_grad():
        torch.testing.assert_close(model(x, wrong * torch.tensor([1.0, float(factor)])[:, None, None]), model(x, right))


def test_coordinates_that_say_nothing_of_a_resolution():
    """Few tiles, columns that are left out, places at random and a grid of the model's own: warnings are errors."""
    model, (x, coords) = GigaPathSlideEncoder(SMALL).eval(), slides()
    grid = torch.cartesian_prod(torch.arange(0, 20, 2), torch.arange(9)) * 256
    model(x, torch.stack([coords[0], grid, grid + 77, coords[1] // 256 * 256]))
    model(x[:, :4], grid[None, :4].expand(4, -1, -1) * 2)


def test_a_projection_is_called_once_for_all_slides():
    model, seen = GigaPathSlideEncoder(SMALL).eval(), []
    x, coords = slides()
    model.projection.register_forward_hook(lambda module, inputs, out: seen.append(len(out)))
    model(x, coords, lengths=[90, 1, 37, 64])
    assert seen == [192]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_slide_encoder_is_exported(compiled, compiling_python):
    compiling_python(
        f"""
        compiled = {compiled}
        """
        """
        import torch
        from dilated_attention import Dilated
        from dilated_attention.models import GigaPathConfig, GigaPathSlideEncoder, LongNetConfig

        longnet = LongNetConfig(
            vocab_size=None, embed_dim=32, num_layers=1, num_heads=4, positions=None, pattern=Dilated((16, 64), (1, 2))
        )
        model = GigaPathSlideEncoder(GigaPathConfig(in_chans=8, slide_ngrids=64, encoder=longnet)).eval()
        inputs, more = ((torch.randn(1, n, 8), torch.randint(16384, (1, n, 2))) for n in (90, 9))
        if compiled:
            run = torch.compile(model, fullgraph=True, backend="aot_eager")
        else:
            tiles = {1: torch.export.Dim("tiles", min=2, max=1 << 20)}
            run = torch.export.export(model, inputs, dynamic_shapes=(tiles, tiles)).module()
        for some in (inputs, more):
            torch.testing.assert_close(run(*some), model(*some))
        """
    )


def test_a_head_that_is_put_on_a_model_without_a_classifier(tmp_path):
    encoder = dataclasses.replace(ENCODER, final_norm=False)
    model = LongViT(LongViTConfig(image_size=32, patch_size=8, encoder=encoder)).eval()
    images = torch.randn(2, 3, 32, 32)
    states = model(images)
    model.head = nn.Linear(32, 5)
    torch.testing.assert_close(model(images), model.head(states.mean(1)))
    with pytest.raises(ValueError, match=r"has unknown head\.bias.*configuration"):
        model.save_pretrained(tmp_path)
