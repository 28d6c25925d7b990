"""The LongNet language model: configuration, meaning, files."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.patterns import Dilated
from tolerances import TOLERANCE, relative_error

SMALL = LongNetConfig(
    vocab_size=50, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, pattern=Dilated((8, 32), (1, 4))
)


@pytest.fixture
def model() -> LongNetLM:
    return LongNetLM(SMALL)


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path)
    return tmp_path


def test_logits_depend_on_earlier_tokens_only(model):
    tokens = torch.randint(50, (2, 40))
    changed = tokens.clone()
    changed[:, 25:] = (changed[:, 25:] + 1) % 50
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 40, 50)
    torch.testing.assert_close(after[:, :25], before[:, :25])
    assert not torch.allclose(after[:, 25], before[:, 25])


def test_dense_is_the_same_model_with_one_segment():
    dense = LongNetLM(dataclasses.replace(SMALL, pattern=None)).double()
    covered = LongNetLM(dataclasses.replace(SMALL, pattern=Dilated((64,), (1,)))).double()
    covered.load_state_dict(dense.state_dict())
    tokens = torch.randint(50, (2, 30))
    assert relative_error(covered(tokens), dense(tokens)) <= TOLERANCE[torch.float64]
    torch.manual_seed(5)
    first = LongNetLM(dataclasses.replace(SMALL, pattern=None)).state_dict()
    torch.manual_seed(5)
    second = LongNetLM(SMALL).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_loss_is_the_mean_over_next_tokens(model):
    tokens = torch.randint(50, (2, 11))
    logits = model(tokens[:, :-1]).log_softmax(-1)
    expected = -sum(logits[b, i, tokens[b, i + 1]] for b in range(2) for i in range(10)) / 20
    torch.testing.assert_close(model.loss(tokens), expected)
    assert abs(model.loss(tokens).item() - math.log(50)) < 1.5


def test_positions_move_nothing_but_rotations(model):
    tokens = torch.randint(50, (1, 12))
    torch.testing.assert_close(model(tokens, positions=torch.arange(12)), model(tokens))
    shifted = model(tokens, positions=torch.arange(100, 112))  # rotary: only distances count
    torch.testing.assert_close(shifted, model(tokens), rtol=1e-4, atol=1e-5)


def test_generate(model):
    prompt = torch.randint(50, (2, 5))
    greedy = model.generate(prompt, 4, temperature=0.0)
    assert torch.equal(greedy[:, :5], prompt)
    for i in range(5, 9):
        assert torch.equal(greedy[:, i], model(greedy[:, :i])[:, -1].argmax(-1))
    one, two = (model.generate(prompt, 6, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(model.generate(prompt, 0), prompt)
    with pytest.raises(ValueError, match="empty prompt"):
        model.generate(prompt[:, :0], 4)
    with pytest.raises(ValueError, match="temperature=-1"):
        model.generate(prompt, 4, temperature=-1.0)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        LongNetConfig(pattern=None),
        LongNetConfig(pattern=Dilated((4, 8), (1, 2), offsets=((0, 0, 0, 0), (0, 1, -1, 1)))),
        LongNetConfig(pattern=Dilated((4, 8), (1, 2), head_groups=True), mlp_dim=100),
    ],
)
def test_configuration_survives_json(config):
    assert LongNetConfig.from_json(config.to_json()) == config


def test_saved_and_loaded(model, folder):
    loaded = LongNetLM.from_pretrained(folder)
    assert loaded.config == SMALL
    tokens = torch.randint(50, (1, 40))
    assert torch.equal(loaded(tokens), model(tokens))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    model.bfloat16().save_pretrained(folder)
    assert LongNetLM.from_pretrained(folder).embedding.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dim": 30}, "embed_dim=30"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"vocab_size": 2.5}, r"vocab_size=2\.5"),
        ({"num_heads": True}, "num_heads=True"),
        ({"num_kv_heads": 3}, "num_kv_heads=3"),
        ({"rope_base": "big"}, "rope_base='big'"),
        ({"pattern": [4, 1]}, "pattern=.4, 1."),
        ({"pattern": Dilated((4, 8), (1, 2), offsets=((0,), (1,)))}, "offsets"),
    ],
)
def test_wrong_configuration(changes, message, unchecked):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def edit_config(folder, edit):
    fields = json.loads((folder / "config.json").read_text())
    edit(fields)
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda f: f.update(depth=3), "unknown field depth"),
        (lambda f: f.pop("embed_dim"), "missing field embed_dim"),
        (lambda f: f.update(num_layers="2"), "num_layers='2'"),
        (lambda f: f["pattern"].update(stride=1), "pattern: unknown field stride"),
        (lambda f: f.update(pattern=[8, 32]), "pattern: expected an object"),
        (lambda f: f["pattern"].update(segment_lengths="8"), "segment_lengths"),
        (lambda f: f.update(vocab_size=51), r"embedding.weight has shape \(50, 32\), expected \(51, 32\)"),
        (lambda f: f.update(num_layers=3), r"lacks blocks\.2\.[^ ]*(, blocks\.2\.[^ ]*)*, \.\.\."),
        (lambda f: f.update(num_layers=1), r"has unknown blocks\.1\."),
    ],
)
def test_wrong_config_file(folder, edit, message, unchecked):
    edit_config(folder, edit)
    with pytest.raises(ValueError, match=message):
        LongNetLM.from_pretrained(folder)


def test_damaged_files(folder, tmp_path):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        weights.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model.safetensors: truncated, or not a safetensors file"):
            LongNetLM.from_pretrained(folder)
    weights.write_bytes(whole)
    save_file(load_file(weights), weights, {"architecture": "Other"})
    with pytest.raises(ValueError, match="architecture is 'Other', not 'LongNetLM'"):
        LongNetLM.from_pretrained(folder)
    weights.unlink()
    with pytest.raises(ValueError, match="there is no such file"):
        LongNetLM.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: configuration: not JSON"):
        LongNetLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"nowhere.config.json: cannot be read"):
        LongNetLM.from_pretrained(tmp_path / "nowhere")
