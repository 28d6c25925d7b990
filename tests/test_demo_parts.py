"""The parts of the demo: the task of recall and its window, the byte model, cut contexts."""

from __future__ import annotations

import math

import pytest
import torch

from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention_lab.training import demo, recall
from dilated_attention_lab.training.byte_model import ByteLM


def test_a_question_has_one_fact_at_the_distance_asked_for():
    sequences, answers = recall.draw(50, 300, torch.Generator().manual_seed(0), range(40, 44))
    assert (sequences[:, -1] == recall.VALUES).all()
    facts = sequences < recall.VALUES
    assert (facts.sum(1) == 1).all()
    assert (sequences[facts] == answers).all()
    assert set((299 - facts.int().argmax(1)).tolist()) == {40, 41, 42, 43}


def influence(model: LongNetLM, tokens: int) -> list[int]:
    """Positions whose embedding the answer at the end depends on."""
    x = torch.randn(1, tokens, recall.WIDTH, requires_grad=True)
    (states,) = model.hidden(x, is_causal=True)
    states[0, -1, 0].backward()  # not the sum, which the norm keeps at 0
    return x.grad.abs().sum(-1)[0].nonzero().flatten().tolist()


def test_two_dilated_layers_reach_every_token_and_the_window_what_it_says():
    tokens = 4096
    models = recall.models(tokens, 0, torch.device("cpu"))
    assert influence(models["dilated"], tokens) == list(range(tokens))
    reach = recall.window_reach(recall.window_of_equal_cost(tokens))
    assert influence(models["window"], tokens) == list(range(tokens - 1 - reach, tokens))
    for one, other in zip(models["dilated"].parameters(), models["window"].parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_window_costs_at_least_what_dilated_attention_costs():
    for tokens in (256, 4096):
        window = recall.window_of_equal_cost(tokens)
        assert recall.window_entries(tokens, window) == int(torch.ones(tokens, tokens).tril().triu(1 - window).sum())
        assert 0 <= recall.window_entries(tokens, window) - recall.dilated_entries(tokens) < tokens


def test_learning_takes_the_steps_it_is_given():
    model = LongNetLM(recall.config(recall.pattern(256)))
    lessons = list(recall.learn(model, 512, torch.Generator().manual_seed(0), {128: 2, 512: 1, 2048: 9}))
    assert [(lesson.tokens, lesson.step) for lesson in lessons] == [(128, 1), (128, 2), (512, 1)]
    soon = recall.learn(model, 128, torch.Generator().manual_seed(0), {128: 2}, until=-1.0)
    assert len(list(soon)) == 1


def test_embeddings_of_ngrams_see_the_bytes_that_end_there_and_no_others():
    model = ByteLM(LongNetConfig(embed_dim=16, num_layers=1, num_heads=2), sizes=(2, 3), rows=1 << 12)
    tokens = torch.randint(256, (1, 20), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 10] = (other[0, 10] + 1) % 256
    changed = (model.embed(tokens) != model.embed(other)).any(-1)[0].nonzero().flatten()
    assert changed.tolist() == [10, 11, 12, 13]
    assert torch.equal(model.embed(tokens)[:, :7], model.embed(tokens[:, :7]))


def test_the_first_layer_begins_by_looking_at_what_followed_the_same_bytes():
    torch.manual_seed(0)
    config = LongNetConfig(embed_dim=128, num_layers=1, num_heads=2, pattern=None, positions=None)
    model = ByteLM(config, rows=1 << 12, sharpness=30.0)
    text = torch.randint(256, (1, 100))
    text[0, 80:84] = text[0, 20:24]
    block = model.blocks[0]
    q, k, _ = block.attention.project(block.attention_norm(model.embed(text)))
    scores = torch.einsum("hd, khd -> hk", q[0, 83], k[0, :83])
    assert scores.argmax(1).tolist() == [24, 24]


def test_cut_contexts_score_the_same_bytes(monkeypatch):
    """A model whose logits say how many bytes it was given: each scored byte has its context, or a quarter more."""
    given: list[int] = []

    def model(tokens: torch.Tensor) -> torch.Tensor:
        given.append(tokens.shape[1])
        return torch.nn.functional.one_hot(tokens, 256) * 50.0  # predicts that every byte equals the one before

    monkeypatch.setattr(demo, "SCORED", 16)
    window = torch.full((1, 65), 7)
    window[0, 60] = 9  # two of the 16 scored bytes are not as the one before
    for context, length in ((4, 5), (8, 10), (64, 64)):
        bits = demo.bits_per_byte(model, window, context)
        assert given[-1] == length
        assert bits == pytest.approx(2 * 50 / math.log(2) / 16, rel=1e-3)
