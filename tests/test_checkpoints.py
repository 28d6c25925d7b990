"""Checkpoints of other implementations against their recorded outputs; golden/README.md says what is in the files."""

from __future__ import annotations

import json
import pickle
import random
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch.utils import serialization

from dilated_attention.models import (
    GigaPathSlideEncoder,
    LongNetAttention,
    LongNetEncoder,
    LongNetLM,
    LongViT,
    load_gigapath,
    load_longvit,
    load_torchscale,
    read_checkpoint,
)
from tolerances import GOLDEN

FOLDER = Path(__file__).parent / "golden"
MODULES = sorted(path.stem for path in FOLDER.glob("ts_module_*.npz"))
ENCODERS = sorted(path.stem for path in FOLDER.glob("ts_longnet_encoder_*.npz"))
GIGAPATH = "gigapath_slide_segs_small_aligned"


def recorded(name: str) -> tuple[dict, dict[str, torch.Tensor]]:
    with numpy.load(FOLDER / f"{name}.npz") as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files if key != "meta"}
        return json.loads(str(file["meta"])), arrays


class Golden:
    """A recorded file: arrays by name, its configuration, its state_dict, and the arguments that no weight tells."""

    def __init__(self, name: str):
        self.meta, self.arrays = recorded(name)
        self.weights = {key[3:]: x for key, x in self.arrays.items() if key.startswith("sd/")}
        self.options = {
            "segment_lengths": self.meta["segment_length"],
            "dilation_rates": self.meta["dilated_ratio"],
            "num_heads": self.meta.get("heads") or self.meta["num_heads"],
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.arrays[name]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, **GOLDEN)


@pytest.mark.parametrize("name", MODULES)
def test_torchscale_attention(name):
    golden = Golden(name)
    model = load_torchscale(golden.weights, **golden.options)
    assert isinstance(model, LongNetAttention)
    x = golden["x"].clone().requires_grad_()
    out = model(x, is_causal=golden.meta["is_causal"])
    close(out, golden["out"])
    out.backward(golden["g"])
    dim = golden.meta["embed_dim"]
    # Q2: torchscale cuts the gradient of the mixing weights, and with it a part of those of q and k, and so of x.
    exact = {
        "grad/v_proj.weight": model.attention.input.weight.grad[2 * dim :],
        "grad/v_proj.bias": model.attention.input.bias.grad[2 * dim :],
        "grad/out_proj.weight": model.attention.output.weight.grad,
        "grad/out_proj.bias": model.attention.output.bias.grad,
    }
    if golden.meta["subln"]:
        exact["grad/inner_attn_ln.weight"] = model.attention.norm.weight.grad
        exact["grad/inner_attn_ln.bias"] = model.attention.norm.bias.grad
    for key, gradient in exact.items():
        close(gradient, golden[key])
    assert (x.grad - golden["dx"]).norm() > 0.01 * golden["dx"].norm()


@pytest.mark.parametrize("name", ENCODERS)
def test_torchscale_encoder(name):
    golden = Golden(name)
    model = load_torchscale(golden.weights, **golden.options)
    assert isinstance(model, LongNetEncoder)
    assert not golden["padding_mask"].any()
    states = model(golden["x"], all_layers=True)
    close(states[0], golden["x"])
    close(states[1], golden["hidden1"])
    close(states[-1], golden["out"])
    assert len(states) == golden.meta["layers"] + 2
    close(model(golden["x"]), golden["out"])


def test_torchscale_decoder():
    golden = Golden("ts_longnet_decoder_xpos")
    model = load_torchscale(golden.weights, **{**golden.options, "num_heads": None})
    assert isinstance(model, LongNetLM)
    assert (model.config.num_heads, model.config.positions) == (4, "xpos")
    close(model(golden["tokens"]), golden["logits"])
    logits, cache = model.prefill(golden["tokens"][:, :20])
    for position in range(20, 60):
        close(logits, golden["logits"][:, position - 1])
        logits = model.decode(golden["tokens"][:, position], cache)


def test_gigapath():
    golden = Golden(GIGAPATH)
    model = load_gigapath(golden.weights, **golden.options, slide_ngrids=16)
    x, coords = golden["x"], golden["coords"]
    close(model(x, coords), golden["cls_out"])
    close(model(x, coords, global_pool=True), golden["global_pool_out"])
    close(model(x, coords, all_layers=True), golden["all_layer_cls"])
    close(model.tokens(x, coords)[0], golden["encoder_tokens"])


def test_gigapath_positions_are_those_of_the_table():
    golden = Golden(GIGAPATH)
    model = load_gigapath(golden.weights, **golden.options, slide_ngrids=16)
    places = torch.cartesian_prod(torch.arange(16), torch.arange(16))
    coords = places * 256 + torch.randint(256, places.shape)
    with torch.no_grad():
        model.projection.weight.zero_()
        model.projection.bias.zero_()
        sines = model.embed(torch.zeros(1, 256, model.config.in_chans), coords[None])[0][0, 1:]
    torch.testing.assert_close(sines, golden["pos_embed"][0, 1:], rtol=1e-6, atol=1e-6)


def test_corrected_results_are_offered_by_name():
    """Both results are equal without padding.

    With it they differ by the attended zeros; exact is what a longer grid gives.
    """
    aligned, ragged = (Golden(f"ts_longnet_encoder_{name}") for name in ("aligned", "ragged"))
    close(load_torchscale(aligned.weights, **aligned.options, compat=None)(aligned["x"]), aligned["out"])
    exact = load_torchscale(ragged.weights, **ragged.options, compat=None)
    assert exact.config.compat is None
    assert exact.config.pattern.offsets == "head_block"
    out = exact(ragged["x"])
    assert (out - ragged["out"]).norm() > 0.01 * out.norm()
    # The last segment of each branch alone, 70 = 2 x 24 + 22 = 8 x 8 + 6: the second half of two is the same as padded.
    literal = load_torchscale(ragged.weights, **ragged.options)
    whole = literal(ragged["x"][:, :48])
    close(exact(ragged["x"][:, :48]), whole)
    golden = Golden(GIGAPATH)
    model = load_gigapath(golden.weights, **golden.options, slide_ngrids=16, compat=None)
    assert (model(golden["x"], golden["coords"]) - golden["cls_out"]).abs().max() > 1e-3


def encoder_decoder_weights(layers=2, dim=16, hidden=24, vocab=11, embedded=False) -> dict[str, torch.Tensor]:
    """Return weights with torchscale's names: sub-LN everywhere except in cross-attention, no positions."""
    weights: dict[str, torch.Tensor] = {}

    def linear(name, rows, columns):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = torch.randn(rows, columns) / 4, torch.randn(rows) / 4

    def norm(name, size):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + torch.randn(size) / 4, torch.randn(size) / 4

    for half in ("encoder", "decoder"):
        for i in range(layers):
            layer = f"{half}.layers.{i}"
            for attention in ("self_attn", "encoder_attn") if half == "decoder" else ("self_attn",):
                for part in ("q", "k", "v", "out"):
                    linear(f"{layer}.{attention}.{part}_proj", dim, dim)
                norm(f"{layer}.{attention}_layer_norm", dim)
            norm(f"{layer}.self_attn.inner_attn_ln", dim)
            linear(f"{layer}.ffn.fc1", hidden, dim)
            linear(f"{layer}.ffn.fc2", dim, hidden)
            norm(f"{layer}.ffn.ffn_layernorm", hidden)
            norm(f"{layer}.final_layer_norm", dim)
        norm(f"{half}.layer_norm", dim)
    for name in ["decoder", "encoder"][: 1 + embedded]:
        weights[f"{name}.embed_tokens.weight"] = torch.randn(vocab, dim)
    weights["decoder.output_projection.weight"] = torch.randn(vocab, dim)
    return weights


BRANCHES = {"segment_lengths": [8, 16], "dilation_rates": [1, 2], "num_heads": 4}


def test_a_decoder_that_reads_an_encoder_is_refused():
    with pytest.raises(ValueError, match=r"surplus: layers\.0\.encoder_attn\."):
        load_torchscale(encoder_decoder_weights(), **BRANCHES, prefix="decoder.")


def test_a_tied_output_stays_tied():
    weights = {name: x for name, x in encoder_decoder_weights().items() if name.startswith("decoder.")}
    weights = {name.removeprefix("decoder."): x for name, x in weights.items() if "encoder_attn" not in name}
    assert load_torchscale(weights, **BRANCHES).output is not None
    weights["output_projection.weight"] = weights["embed_tokens.weight"].clone()
    assert load_torchscale(weights, **BRANCHES).output is None
    encoder = load_torchscale(
        {name: x for name, x in weights.items() if "output" not in name}, **BRANCHES, architecture="encoder"
    )
    assert isinstance(encoder, LongNetEncoder)
    assert encoder(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 16)


def test_an_encoder_with_an_output():
    weights = {name: x for name, x in encoder_decoder_weights(embedded=True).items() if name.startswith("encoder.")}
    weights["encoder.output_projection.weight"] = torch.randn(11, 16)
    assert isinstance(load_torchscale(weights, **BRANCHES), LongNetLM)
    with pytest.raises(ValueError, match=r"surplus: output_projection\.weight"):
        load_torchscale(weights, **BRANCHES, architecture="encoder")
    with pytest.warns(UserWarning, match=r"no place for them: output_projection\.weight"):
        model = load_torchscale(weights, **BRANCHES, architecture="encoder", surplus="warn")
    assert isinstance(model, LongNetEncoder)


def longvit_weights(side=4, patch=2, dim=16, prefix="", classes=None) -> dict[str, torch.Tensor]:
    encoder = {
        f"{prefix}{name}": x
        for name, x in encoder_decoder_weights(dim=dim).items()
        if name.startswith("encoder.") and not name.startswith("encoder.layer_norm")
    }
    encoder[f"{prefix}patch_embed.proj.weight"] = torch.randn(dim, 3, patch, patch)
    encoder[f"{prefix}patch_embed.proj.bias"] = torch.randn(dim)
    encoder[f"{prefix}pos_embed"] = torch.randn(1, side * side, dim)
    if classes:
        encoder |= {"fc_norm.weight": torch.randn(dim), "fc_norm.bias": torch.randn(dim)}
        encoder |= {"head.weight": torch.randn(classes, dim), "head.bias": torch.randn(classes)}
    return encoder


def test_longvit():
    weights = longvit_weights(prefix="model.", classes=3)
    model = load_longvit(weights, **BRANCHES)
    assert isinstance(model, LongViT)
    images = torch.randn(2, 3, 8, 8)
    layers = {name.removeprefix("model."): x for name, x in weights.items() if "encoder." in name}
    encoder = load_torchscale(layers, **BRANCHES)
    x = torch.nn.functional.conv2d(
        images, weights["model.patch_embed.proj.weight"], weights["model.patch_embed.proj.bias"], stride=2
    )
    states = encoder(x.flatten(2).transpose(1, 2) + weights["model.pos_embed"])
    mean = torch.nn.functional.layer_norm(states.mean(1), (16,), weights["fc_norm.weight"], weights["fc_norm.bias"])
    close(model(images), mean @ weights["head.weight"].T + weights["head.bias"])
    bare = load_longvit({name.removeprefix("model."): x for name, x in longvit_weights().items()}, **BRANCHES)
    assert bare(images).shape == (2, 16, 16)
    assert bare(torch.randn(1, 3, 12, 6)).shape == (1, 18, 16)  # interpolated positions
    with pytest.raises(ValueError, match="sides multiples of 2"):
        bare(torch.randn(1, 3, 7, 8))
    with pytest.raises(ValueError, match=r"sides multiples of 2; got shape \(1, 3, 0, 8\)"):
        bare(torch.zeros(1, 3, 0, 8))
    with pytest.raises(ValueError, match="image size 8: not of a released model"):
        load_longvit(longvit_weights(), num_heads=4)


def test_longvit_of_a_released_size_has_its_segments():
    model = load_longvit(longvit_weights(side=32, patch=32), num_heads=4)
    assert model.config.image_size == 1024
    assert model.config.encoder.pattern.segment_lengths == (64, 128, 256, 512, 1024)


LOADERS = {
    "ts_longnet_encoder_aligned": (load_torchscale, LongNetEncoder, {}),
    "ts_longnet_decoder_xpos": (load_torchscale, LongNetLM, {}),
    "ts_module_plain": (load_torchscale, LongNetAttention, {}),
    GIGAPATH: (load_gigapath, GigaPathSlideEncoder, {"slide_ngrids": 16}),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("form", ["safetensors", "torch", "wrapped", "legacy"])
def test_files(name, form, tmp_path):
    golden = Golden(name)
    load, kind, options = LOADERS[name]
    expected = load(golden.weights, **golden.options, **options)
    path = tmp_path / "weights"
    if form == "safetensors":
        save_file(golden.weights, path)
    else:
        held = {"model": golden.weights, "epoch": 3} if form == "wrapped" else golden.weights
        torch.save(held, path, _use_new_zipfile_serialization=form != "legacy")
    loaded = load(path, **golden.options, **options)
    assert type(loaded) is kind
    assert not loaded.training
    for key, x in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], x)
    loaded.save_pretrained(tmp_path / "folder")
    again = kind.from_pretrained(tmp_path / "folder")
    assert again.config == loaded.config
    assert all(torch.equal(again.state_dict()[key], x) for key, x in expected.state_dict().items())


@pytest.mark.parametrize("end", ["", ".safetensors", ".pth"])
def test_a_file_is_what_its_first_bytes_say(end, tmp_path):
    """Not what its name says; and the length that a safetensors file begins with may begin as a pickle does."""
    path, first = tmp_path / f"weights{end}", set()
    for length in range(1, 300):
        expected = {"x" * length: torch.randn(2)}
        save_file(expected, path)
        whole = path.read_bytes()
        if whole[0] in first:
            continue
        first.add(whole[0])
        found = read_checkpoint(path)
        assert found.keys() == expected.keys()
        path.write_bytes(whole[:-3])
        with pytest.raises(ValueError, match="truncated, or not a safetensors file"):
            read_checkpoint(path)
        path.write_bytes(whole[:5])
        with pytest.raises(ValueError, match=r"weights[.\w]*: (truncated|damaged)"):
            read_checkpoint(path)
    assert 0x80 in first
    for zipped in (True, False):
        torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=zipped)
        assert torch.equal(read_checkpoint(path)["a"], torch.ones(3))


def test_a_file_is_read_whatever_torch_loads_by_default(tmp_path):
    for zipped in (True, False):
        torch.save({"a": torch.ones(3)}, tmp_path / "weights", _use_new_zipfile_serialization=zipped)
        with serialization.config.patch("load.mmap", True):
            assert torch.equal(read_checkpoint(tmp_path / "weights")["a"], torch.ones(3))


def test_a_loaded_model_owns_its_weights():
    golden = Golden("ts_longnet_encoder_aligned")
    before = {name: x.clone() for name, x in golden.weights.items()}
    model = load_torchscale(golden.weights, **golden.options)
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.requires_grad
            parameter.zero_()
    assert all(torch.equal(golden.weights[name], x) for name, x in before.items())


def test_what_a_file_shares_becomes_two_parameters(tmp_path):
    weights = encoder_decoder_weights(embedded=True)
    shared = weights["encoder.layers.0.ffn.fc1.weight"]
    weights["encoder.layers.1.ffn.fc1.weight"] = shared
    torch.save(weights, tmp_path / "weights.pth")
    model = load_torchscale(tmp_path / "weights.pth", **BRANCHES, prefix="encoder.")
    assert all(torch.equal(block.mlp[0].weight, shared) for block in model.blocks)
    storages = {x.untyped_storage().data_ptr() for x in model.parameters()}
    assert len(storages) == len(list(model.parameters()))
    model.save_pretrained(tmp_path / "out")
    again = LongNetEncoder.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], x) for name, x in model.state_dict().items())


class Malicious:
    def __reduce__(self):
        return (print, ("a pickle ran code",))


def test_a_pickle_that_is_not_plain_tensors_is_never_run(tmp_path, capsys):
    path = tmp_path / "weights.pth"
    for held in ({"model": Malicious()}, Malicious()):
        torch.save(held, path)
        with pytest.raises(ValueError, match="a pickle of more than plain tensors, which is never run"):
            load_gigapath(path)
    path.write_bytes(pickle.dumps(Malicious(), protocol=2))
    with pytest.raises(ValueError, match="never run"):
        load_gigapath(path)
    assert "ran code" not in capsys.readouterr().out
    for held, message in (
        ({"a": [1, 2], "b": torch.zeros(1)}, r"not plain tensors: a \(list\)"),
        ([torch.zeros(1)], "expected a state_dict, names to tensors; got list"),
        ({"a": torch.zeros(2, dtype=torch.int64)}, r"weights must be floating-point; got a \(torch.int64\)"),
    ):
        torch.save(held, path)
        with pytest.raises(ValueError, match=message):
            read_checkpoint(path)


@pytest.mark.parametrize("in_file", [False, True])
def test_tensors_that_are_not_held_whole(in_file, tmp_path):
    """A file of a few kilobytes must not ask for terabytes."""
    path, size = tmp_path / "weights.pth", 1 << 20
    for x in (
        torch.zeros(1).expand(size, size),
        torch.zeros(20).as_strided((3, 16), (1, 1)),
        torch.eye(4).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        torch.empty(size, size, device="meta"),
    ):
        held = {"q_proj.weight": x}
        if in_file:
            torch.save(held, path)
        with pytest.raises(ValueError, match=r"(stored: q_proj\.weight; save|never run .*; save)"):
            read_checkpoint(path if in_file else held)
    table = torch.randn(4, 6)
    views = {"a": table, "tied": table, "b": table.T, "c": table[1:3, ::2], "d": torch.zeros(0, 6), "e": table[0, 0]}
    torch.save(views, path)
    for name, x in read_checkpoint(path if in_file else views).items():
        assert torch.equal(x, views[name])


def test_what_is_missing_takes_no_memory():
    """The shape of one matrix determines all other shapes."""
    options = {"segment_lengths": [8], "dilation_rates": [1]}
    held = {"q_proj.weight": torch.zeros(1 << 24, 1)}
    shapes = r"missing: k_proj\.weight, .*of another shape: q_proj\.weight \(16777216, 1\)"
    with pytest.raises(ValueError, match=shapes):
        load_torchscale(held, num_heads=8, **options)
    held = {"q_proj.weight": torch.zeros(16, 16), "xpos.scale": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"missing: k_proj\.weight, .*of another shape: xpos\.scale \(3,\)"):
        load_torchscale(held, **options)


def test_damaged_files(tmp_path):
    golden = Golden(GIGAPATH)
    options = {**golden.options, "slide_ngrids": 16}
    safe, pth = tmp_path / "weights.safetensors", tmp_path / "weights.pth"
    save_file(golden.weights, safe)
    torch.save(golden.weights, pth)
    for path, lengths in ((safe, (0, 5, 2000, -1)), (pth, (3, 2000, -1))):
        whole = path.read_bytes()
        for length in lengths:
            path.write_bytes(whole[:length])
            with pytest.raises(ValueError, match=r"weights\.\w+: (truncated|damaged)"):
                load_gigapath(path, **options)
        path.write_bytes(whole)
    whole = bytearray(safe.read_bytes())
    whole[200:260] = b"x" * 60  # inside the header
    safe.write_bytes(whole)
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_gigapath(safe, **options)
    with zipfile.ZipFile(pth, "w") as file:
        file.writestr("readme.txt", "no tensors")
    with pytest.raises(ValueError, match="damaged"):
        load_gigapath(pth, **options)
    with pytest.raises(ValueError, match="nowhere: cannot be read"):
        load_gigapath(tmp_path / "nowhere", **options)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_flipped_bytes_are_a_value_error_or_nothing(form, tmp_path):
    path, chance = tmp_path / "weights.pth", random.Random(0)
    weights = {"a.weight": torch.randn(5, 3), "b": torch.randn(3)}
    torch.save(weights, path, _use_new_zipfile_serialization=form == "zip")
    whole = path.read_bytes() if form != "pickle" else pickle.dumps({"a": 1, "b": [1, (3, "x")]}, protocol=2)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data[: chance.choice([len(data), chance.randrange(len(data))])])
        try:
            read_checkpoint(path)
        except ValueError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("drop", "change", "message"),
    [
        (
            ["norm.bias", "encoder.layers.1.ffn.fc1.bias"],
            {},
            r"missing: encoder\.layers\.1\.ffn\.fc1\.bias, norm\.bias$",
        ),
        ([], {"head.weight": torch.zeros(2)}, r"surplus: head\.weight$"),
        ([], {"cls_token": torch.zeros(1, 2, 64)}, r"of another shape: cls_token \(1, 2, 64\) for \(1, 1, 64\)$"),
        (["cls_token"], {"a": torch.zeros(1), "b": torch.zeros(1)}, r"missing: cls_token; surplus: a, b$"),
        ([], {"encoder.layers.1.self_attn.k_proj.weight": torch.zeros(64, 32)}, r"of another shape: encoder\.layers"),
        (["encoder.layers.0.self_attn.q_proj.weight"], {}, r"of no LongNet of torchscale: no matrix encoder"),
        ([], {f"x{i}": torch.zeros(1) for i in range(20)}, r"surplus: x0, x1, x10, .*, \.\.\. \(20 in all\)$"),
    ],
)
def test_weights_that_do_not_fit(drop, change, message):
    golden = Golden(GIGAPATH)
    weights = {name: x for name, x in golden.weights.items() if name not in drop} | change
    with pytest.raises(ValueError, match=message):
        load_gigapath(weights, **golden.options, slide_ngrids=16)


def test_surplus_may_be_left_with_a_warning():
    golden = Golden(GIGAPATH)
    options = {**golden.options, "slide_ngrids": 16, "surplus": "warn"}
    more = {**golden.weights, "mask_token": torch.zeros(3), "pos_embed": golden["pos_embed"]}
    with pytest.warns(UserWarning, match="not loaded, GigaPath's slide encoder has no place for them: mask_token"):
        load_gigapath(more, **options)
    with pytest.raises(ValueError, match=r"missing: norm\.weight; surplus: mask_token"):
        load_gigapath({name: x for name, x in more.items() if name != "norm.weight"}, **options)


def test_part_of_a_larger_model(tmp_path):
    golden = Golden("ts_longnet_encoder_aligned")
    larger = {f"LongNet_encoder.{name}": x for name, x in golden.weights.items()}
    larger |= {"llm.embed.weight": torch.zeros(2, 2), "projector.bias": torch.zeros(2)}
    path = tmp_path / "model.pth"
    torch.save({"state_dict": larger}, path)
    model = load_torchscale(path, **golden.options, prefix="LongNet_encoder.")
    close(model(golden["x"]), golden["out"])
    with pytest.raises(
        ValueError, match=r"prefix='encoder\.': no name in .* begin with LongNet_encoder, llm, projector$"
    ):
        load_torchscale(path, **golden.options, prefix="encoder.")
    gigapath = Golden(GIGAPATH)
    model = load_gigapath(
        {f"slide.{name}": x for name, x in gigapath.weights.items()},
        **gigapath.options,
        slide_ngrids=16,
        prefix="slide.",
    )
    close(model(gigapath["x"], gigapath["coords"]), gigapath["cls_out"])


@pytest.mark.parametrize(("layers", "width", "heads"), [(2, 512, 8), (12, 768, 16)])
def test_encoders_of_other_widths(layers, width, heads):
    """Names and shapes of torchscale's encoders; a small MLP keeps the test quick."""
    with torch.device("meta"):
        weights = {}
        for i in range(layers):
            layer = f"layers.{i}"
            linears = {f"self_attn.{name}_proj": (width, width) for name in ("q", "k", "v", "out")}
            linears |= {"ffn.fc1": (64, width), "ffn.fc2": (width, 64)}
            norms = {"self_attn.inner_attn_ln": width, "self_attn_layer_norm": width, "final_layer_norm": width}
            norms |= {"ffn.ffn_layernorm": 64}
            for name, shape in linears.items():
                weights |= {f"{layer}.{name}.weight": torch.empty(shape), f"{layer}.{name}.bias": torch.empty(shape[0])}
            for name, size in norms.items():
                weights |= {f"{layer}.{name}.{part}": torch.empty(size) for part in ("weight", "bias")}
        weights |= {f"layer_norm.{part}": torch.empty(width) for part in ("weight", "bias")}
    weights = {f"LongNet_encoder.{name}": torch.zeros(x.shape) for name, x in weights.items()}
    model = load_torchscale(
        weights, segment_lengths=[16, 32], dilation_rates=[1, 2], num_heads=heads, prefix="LongNet_encoder."
    )
    assert (model.config.num_layers, model.config.embed_dim, model.config.head_dim) == (layers, width, width // heads)
    assert model(torch.zeros(1, 5, width)).shape == (1, 5, width)
    with pytest.warns(UserWarning, match=r"300 samples of one token each; if it is \(seq, batch, ...\)"):
        model(torch.zeros(300, 1, width))


def test_another_architecture():
    gigapath, encoder = Golden(GIGAPATH), Golden("ts_longnet_encoder_aligned")
    bert = {"bert.embeddings.word_embeddings.weight": torch.zeros(4, 4), "bert.pooler.dense.bias": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"of no LongNet of torchscale: .* its names: bert\.embeddings"):
        load_torchscale(bert, **BRANCHES)
    with pytest.raises(ValueError, match="of no LongNet of torchscale"):
        load_torchscale(gigapath.weights, **gigapath.options)
    with pytest.raises(ValueError, match="of no LongNet of torchscale"):
        load_gigapath(encoder.weights)
    with pytest.raises(ValueError, match=r"does not fit LongViT: missing: patch_embed\.proj\.weight, pos_embed"):
        load_longvit(encoder.weights)
    with pytest.raises(ValueError, match=r"missing: embed_tokens\.weight"):
        load_torchscale(encoder.weights, **encoder.options, architecture="decoder")
    with pytest.raises(ValueError, match="architecture='gpt'"):
        load_torchscale(encoder.weights, **encoder.options, architecture="gpt")
    plain = {name: x for name, x in encoder.weights.items() if "ln" not in name.split(".")[-2] or "ffn" in name}
    plain = {name: x for name, x in plain.items() if "layernorm" not in name and not name.startswith("layer_norm")}
    with pytest.raises(ValueError, match="it is of a post-norm model"):
        load_torchscale(plain, **encoder.options)


def test_heads_that_the_weights_contradict():
    golden = Golden("ts_longnet_decoder_xpos")
    with pytest.raises(ValueError, match=r"num_heads=8: .*xpos\.scale has 4 entries, of 4 heads"):
        load_torchscale(golden.weights, **{**golden.options, "num_heads": 8})
    encoder = Golden("ts_longnet_encoder_aligned")
    with pytest.raises(ValueError, match="num_heads: the weights do not tell"):
        load_torchscale(encoder.weights, **{**encoder.options, "num_heads": None})
    with pytest.raises(ValueError, match="dilation_rates must hold positive integers, one per branch; got 4"):
        load_torchscale(encoder.weights, **{**encoder.options, "dilation_rates": 4})
    with pytest.raises(ValueError, match="embed_dim=32: must be a multiple of num_heads=5"):
        load_torchscale(encoder.weights, **{**encoder.options, "num_heads": 5})
    other = {**golden.weights, "layers.1.self_attn.xpos.scale": torch.ones(4)}
    with pytest.raises(ValueError, match=r"layers\.1.self_attn\.xpos\.scale is not"):
        load_torchscale(other, **golden.options)
