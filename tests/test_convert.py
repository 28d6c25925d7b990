"""`convert` and `generate`: what they write, what they print, how they refuse."""

from __future__ import annotations

import argparse
import io
import re
import types

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dilated_attention.models import (
    GigaPathSlideEncoder,
    LongNetAttention,
    LongNetConfig,
    LongNetEncoder,
    LongNetLM,
    LongViT,
)
from dilated_attention.models.checkpoints import read_checkpoint, read_weights
from dilated_attention.patterns import Dilated
from dilated_attention_lab.commands import main
from dilated_attention_lab.conversion import convert
from dilated_attention_lab.training import session, writing
from test_checkpoints import GIGAPATH, Golden, longvit_weights


def run(capsys, *words) -> tuple[int, str, str]:
    try:
        code = main([str(word) for word in words])
    except SystemExit as ended:
        code = ended.code
    return code, *capsys.readouterr()


CASES = {
    "gigapath": (GIGAPATH, GigaPathSlideEncoder, {"slide_ngrids": 16}),
    "encoder": ("ts_longnet_encoder_ragged", LongNetEncoder, {}),
    "decoder": ("ts_longnet_decoder_xpos", LongNetLM, {}),
    "attention": ("ts_module_subln_causal", LongNetAttention, {}),
}


def case_of(name: str) -> tuple[dict, type, str, dict]:
    """Weights, the class of their model, their kind, and the options that no weight tells."""
    branches = {"segment_lengths": [8, 16], "dilation_rates": [1, 2], "num_heads": 4}
    if name in CASES:
        file, kind, options = CASES[name]
        golden = Golden(file)
        weights, options = golden.weights, {**golden.options, **options}
    else:
        weights, kind, options = longvit_weights(prefix="model.", classes=2), LongViT, branches
    return weights, kind, name if name in ("gigapath", "longvit") else "torchscale", options


@pytest.mark.parametrize("name", [*CASES, "longvit"])
def test_parity_with_the_released_algorithm(name, tmp_path):
    weights, kind, what, options = case_of(name)
    torch.save(weights, tmp_path / "weights.pth")
    model, found = convert(tmp_path / "weights.pth", tmp_path / "out", what, tokens=61, **options)
    assert type(model) is kind
    compat, corrected, again = found
    assert compat.relative < 1e-5
    assert compat.greatest < 1e-4
    assert again.greatest == 0
    if name != "decoder":  # causal: no padding is seen
        assert corrected.relative > 1e-3
    assert kind.from_pretrained(tmp_path / "out").config == model.config


@pytest.mark.parametrize("name", [*CASES, "longvit"])
@pytest.mark.parametrize("wrapping", ["prefix", "module", "prefix and module", "compiled layers", "a part"])
def test_parity_of_weights_under_other_names(name, wrapping, tmp_path):
    """A part of a larger model, beside one of the same names and shapes; a data-parallel wrapper; torch.compile and
    FSDP of layers; a part alone."""
    weights, kind, what, options = case_of(name)
    if wrapping in ("compiled layers", "a part"):
        inside = "_orig_mod._fsdp_wrapped_module." if wrapping == "compiled layers" else ""
        before = "student.backbone." if wrapping == "a part" else "_orig_mod."
        names = {x: before + re.sub(r"(layers\.\d+\.)", rf"\1{inside}", x) for x in weights}
        torch.save({names[x]: tensor for x, tensor in weights.items()}, tmp_path / "weights.pth")
        model, found = convert(tmp_path / "weights.pth", tmp_path / "out", what, tokens=61, **options)
        assert type(model) is kind
        assert found[0].relative < 1e-5
        return
    before = "module." if wrapping != "prefix" else ""
    held = {f"{before}{x}": tensor for x, tensor in weights.items()}
    if wrapping != "module":
        other = {f"text.{x}": torch.randn_like(tensor) for x, tensor in held.items()}
        held = other | {f"vision.{x}": tensor for x, tensor in held.items()}
        options = {**options, "prefix": "vision."}
    torch.save(held, tmp_path / "weights.pth")
    model, found = convert(tmp_path / "weights.pth", tmp_path / "out", what, tokens=61, **options)
    assert type(model) is kind
    assert found[0].relative < 1e-5


@pytest.mark.parametrize("name", ["encoder", "longvit"])
def test_parity_beside_layers_that_are_left(name, tmp_path):
    weights, kind, what, options = case_of(name)
    more = {f"a_teacher.{x}": torch.randn_like(tensor) for x, tensor in weights.items()}
    torch.save(more | weights, tmp_path / "weights.pth")
    with pytest.warns(UserWarning, match="not loaded"):
        model, found = convert(tmp_path / "weights.pth", tmp_path / "out", what, tokens=61, surplus="warn", **options)
    assert type(model) is kind
    assert found[0].relative < 1e-5


def test_weights_that_mean_something_else_are_not_written(tmp_path):
    """A wrong option fits every shape."""
    golden = Golden("ts_longnet_encoder_aligned")
    save_file(golden.weights, tmp_path / "weights")
    wrong = {"segment_lengths": [16, 32], "dilation_rates": [1, 2], "num_heads": 4, "norm_eps": 0.5}
    with pytest.raises(ValueError, match=r"differs from the released algorithm by .* nothing was written"):
        convert(tmp_path / "weights", tmp_path / "out", "torchscale", **wrong)
    assert not (tmp_path / "out").exists()


def test_convert_command(tmp_path, capsys):
    golden = Golden("ts_longnet_decoder_xpos")
    path, out = tmp_path / "weights.safetensors", tmp_path / "out"
    save_file(golden.weights, path)
    words = ["convert", path, out, "--kind", "torchscale", "--segments", "16,32", "--rates", "1,2", "--tokens", 60]
    code, printed, _ = run(capsys, *words)
    assert code == 0
    for word in ("LongNetLM", "released algorithm", "read back", "written: "):
        assert word in printed
    torch.testing.assert_close(LongNetLM.from_pretrained(out)(golden["tokens"]), golden["logits"], rtol=1e-4, atol=2e-5)
    written = (out / "config.json").read_bytes()
    code, _, error = run(capsys, *words, "--corrected")
    assert code == 2
    assert f"{out} exists: give --overwrite" in error
    assert (out / "config.json").read_bytes() == written
    words.append("--overwrite")
    assert run(capsys, *words, "--corrected")[0] == 0
    assert LongNetLM.from_pretrained(out).config.compat is None
    for changed, message in (
        (["convert", path, out, "--kind", "torchscale", "--overwrite"], "--segments and --rates"),
        (["convert", path, out, "--kind", "gigapath", "--overwrite"], "of no LongNet of torchscale"),
        (["convert", tmp_path / "nowhere", out, "--kind", "gigapath", "--overwrite"], "cannot be read"),
        ([*words, "--heads", 8], "--heads 8"),
        ([*words, "--architecture", "encoder"], "surplus: output_projection.weight"),
        ([*words, "--kind", "bert"], "invalid choice"),
        ([*words, "--kind", "gigapath", "--architecture", "encoder"], "--architecture encoder is of --kind torchscale"),
    ):
        code, _, error = run(capsys, *changed)
        assert code == 2
        (line,) = error.splitlines()
        assert message in line


@pytest.fixture
def folder(tmp_path):
    config = LongNetConfig(embed_dim=16, num_layers=1, num_heads=2, pattern=Dilated((16, 64), (1, 4)))
    LongNetLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_generate_command(folder, tmp_path, capsys, monkeypatch):
    code, first, _ = run(capsys, "generate", folder, "--prompt", "def f(", "--bytes", 40)
    assert code == 0
    assert run(capsys, "generate", folder, "--prompt", "def f(", "--bytes", 40)[1] == first
    assert run(capsys, "generate", folder, "--prompt", "def f(", "--bytes", 40, "--seed", 1)[1] != first
    (tmp_path / "prompt").write_text("def f(")
    assert run(capsys, "generate", folder, "--prompt-file", tmp_path / "prompt", "--bytes", 40)[1] == first
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(b"def f(")))
    assert run(capsys, "generate", folder, "--prompt-file", "-", "--bytes", 40)[1] == first
    (tmp_path / "prompt").write_bytes(b"r\xff")
    from_file = run(capsys, "generate", folder, "--prompt-file", tmp_path / "prompt", "--bytes", 40)
    assert run(capsys, "generate", folder, "--prompt", "r\udcff", "--bytes", 40) == from_file  # no UTF-8
    greedy = run(capsys, "generate", folder, "--temperature", 0, "--bytes", 40)[1]
    assert run(capsys, "generate", folder, "--top-k", 1, "--bytes", 40)[1] == greedy
    assert run(capsys, "generate", folder, "--bytes", 0)[1] == "\n"


def test_wrong_generate(folder, tmp_path, capsys):
    LongNetLM(LongNetConfig(vocab_size=50, embed_dim=16, num_layers=1, num_heads=2)).save_pretrained(tmp_path / "words")
    for words, message in (
        (["generate", tmp_path / "nowhere"], "neither a model nor a run of `train` (no config.json"),
        (["generate", tmp_path / "words"], "vocab_size=50; text is written by one of bytes, 256"),
        (["generate", folder, "--temperature", "-1"], "--temperature -1.0: must be"),
        (["generate", folder, "--top-p", "2"], "--top-p 2.0: must be"),
        (["generate", folder, "--top-k", "0"], "invalid positive integer value"),
        (["generate", folder, "--prompt", ""], "--prompt is empty"),
        (["generate", folder, "--prompt-file", tmp_path / "no"], "No such file"),
        (["generate", folder, "--device", "abacus"], "--device abacus: "),
    ):
        code, printed, error = run(capsys, *words)
        assert (code, printed) == (2, "")
        (line,) = error.splitlines()
        assert message in line


def test_text_comes_character_by_character(folder, monkeypatch):
    """Bytes of an incomplete character wait.

    Invalid bytes, and characters that a terminal obeys, are shown as replacements.
    """
    model = session.load_model(folder, torch.device("cpu"))
    drawn = [torch.tensor([byte]) for byte in ["é".encode()[0], "é".encode()[1], 27, 97, 0xFF, "€".encode()[0]]]
    monkeypatch.setattr(LongNetLM, "stream", lambda *_, **__: iter(drawn))
    assert list(writing.write(model, b"x", 6)) == ["é", "·", "a", "�", "�"]


def test_a_file_that_keeps_the_options_of_its_command(tmp_path):
    """Fine-tuning scripts write such files.

    Options are data; anything that may run code is refused with its name.
    """
    weights = {"weight": torch.randn(2, 3)}
    torch.save({"model": weights, "epoch": 3, "args": argparse.Namespace(lr=1e-3)}, tmp_path / "options.pth")
    assert torch.equal(read_checkpoint(tmp_path / "options.pth")["weight"], weights["weight"])
    torch.save({"model": weights, "best": np.float64(0.5)}, tmp_path / "number.pth")
    with pytest.raises(ValueError, match=r"it holds numpy.*scalar.*state_dict alone") as raised:
        read_checkpoint(tmp_path / "number.pth")
    assert "\x1b" not in str(raised.value)


def test_weights_that_are_there_twice(tmp_path):
    with pytest.raises(ValueError, match=r"twice.*prefix="):
        read_weights({"a.weight": torch.ones(2), "module.a.weight": torch.ones(2)})


def test_weights_of_one_name():
    assert list(read_weights({"head.projector.weight": torch.ones(2)}, prefix="head.")) == ["projector.weight"]


def test_convert_takes_a_part(tmp_path):
    weights, _, _, _ = case_of("attention")
    held = {f"vision.{name}": x for name, x in weights.items()} | {"text.weight": torch.ones(2)}
    torch.save(held, tmp_path / "weights.pth")
    words = ["convert", str(tmp_path / "weights.pth"), str(tmp_path / "out"), "--kind", "torchscale", "--heads", "4"]
    assert main([*words, "--segments", "16,64", "--rates", "1,2"]) == 2
    assert main([*words, "--segments", "16,64", "--rates", "1,2", "--prefix", "vision."]) == 0
