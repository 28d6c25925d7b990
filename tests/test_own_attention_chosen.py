"""transformers' models that choose the keys of each query, computed at the cost of the keys chosen."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from dilated_attention import UnsupportedError
from dilated_attention.integrations import chosen_keys, index_scores
from dilated_attention.integrations.chosen_keys import as_listed, attend_chosen
from dilated_attention.integrations.huggingface import NAME, dilate, report
from dilated_attention.integrations.own_attention import Chosen, Rows, Shown
from tolerances import relative_error
from transformers_families import CHOOSING, build

TOKENS = 43
MANY = {"index_n_heads": 32}  # then no two keys have the score 0


def _tokens(count: int = TOKENS) -> Tensor:
    return torch.randint(3, 97, (2, count), generator=torch.Generator().manual_seed(1))


def _padded(side: str) -> Tensor:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, slice(11) if side == "left" else slice(-9, None)] = 0
    return mask


def _dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """Return softmax attention in float64, 0 for rows that see nothing. seen: bool `(batch, heads, queries, keys)`."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    score = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        score = torch.cat([score, sinks.double().view(1, -1, 1, 1).expand(*score.shape[:3], 1)], -1)
    weight = score.softmax(-1).nan_to_num(0.0)[..., : k.shape[2]]
    return (weight @ v).transpose(1, 2)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("lists", "kv_heads"), [(1, 2), (2, 2), (4, 2), (2, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 19), (5, 19), (19, 19), (19, 5)])
def test_lists_are_attended_exactly(queries, keys, lists, kv_heads, with_sinks):
    """Entries in any order, repeated, or -1; empty rows; fewer queries than keys, and more."""
    generator = torch.Generator().manual_seed(0)
    make = {"generator": generator, "requires_grad": True}
    q, k, v = (
        torch.randn(2, queries, 4, 8, **make),
        torch.randn(2, keys, 2, 8, **make),
        torch.randn(2, keys, 2, 6, **make),
    )
    sinks = torch.randn(4, **make) if with_sinks else None
    chosen = torch.randint(-1, keys, (2, lists, queries, 7), generator=generator, dtype=torch.int32)
    chosen[1, :, -1] = -1
    seen = torch.zeros(2, lists, queries, keys + 1, dtype=torch.bool).scatter(-1, chosen.long() % (keys + 1), True)
    seen = seen[..., :keys].repeat_interleave(4 // lists, 1)
    leaves = [x for x in (q, k, v, sinks) if x is not None]

    out = attend_chosen(Chosen(chosen), q, k, v, scale=None, sinks=sinks)
    expected = _dense(q, k, v, seen, sinks)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    grad = torch.randn(out.shape, generator=generator)
    found = torch.autograd.grad(out, leaves, grad)
    for one, other in zip(found, torch.autograd.grad(expected, leaves, grad.double()), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    "shown",
    [
        Shown(True),
        Shown(True, 4),
        Shown(False),
        Shown(False, 4),
        Shown(False, 4, 2),
        Shown(True, hidden=torch.arange(20) < torch.tensor([[3], [0]])),
        Shown(True, samples=(torch.arange(20) // 7).expand(2, -1)),
    ],
)
@pytest.mark.parametrize(("q_start", "k_start"), [(0, 0), (9, 0), (12, 5)])
def test_which_keys_a_mask_shows(shown, q_start, k_start):
    queries = 20 - q_start
    if shown.samples is not None and q_start:
        queries = 4
    shown = Shown(**{**vars(shown), "q_start": q_start, "k_start": k_start, "queries": queries, "keys": 20 - k_start})
    if shown.samples is not None and k_start:
        pytest.skip("packed samples have no cache")
    if shown.hidden is not None:
        shown = Shown(**{**vars(shown), "hidden": shown.hidden[:, k_start:]})
    found = ~~Rows(shown)
    for sample in range(2):
        for query in range(queries):
            for key in range(20 - k_start):
                far = k_start + key - q_start - query
                before = shown.window if shown.window is not None else 99
                after = before if shown.after is None else shown.after
                expected = -before < far <= 0 if shown.is_causal else -before <= far <= after
                if shown.hidden is not None:
                    expected = expected and not shown.hidden[sample, key]
                if shown.samples is not None:
                    expected = expected and (k_start + key) // 7 == (q_start + query) // 7
                assert bool(found[min(sample, len(found) - 1), query, key]) == expected


def test_a_list_of_every_key_is_dense():
    shown = Shown(True, queries=4, keys=4)
    every = torch.arange(4).expand(1, 4, -1)
    assert as_listed(torch.nn.Identity(), shown, {"indices": every}) is shown
    some = every.clone()
    some[0, 2, 3] = -1
    assert isinstance(as_listed(torch.nn.Identity(), shown, {"indices": some}), Chosen)


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl"])
def test_lists_as_long_as_the_text(family):
    eager, ours = build(family, "eager"), build(family, NAME)
    ours.load_state_dict(eager.state_dict())
    tokens = _tokens(8)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, eager(tokens).logits, rtol=0, atol=1e-5)
    assert "chosen" not in report(ours)


def _many_heads(family: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    models = [build(family, implementation, **MANY) for implementation in ("eager", NAME)]
    models[1].load_state_dict(models[0].state_dict())
    return models[0], models[1]


@pytest.fixture
def tiles(monkeypatch) -> list[tuple[int, int]]:
    """Make indexers compute tiles of their scores for seven queries; return a list of their (queries, keys)."""
    sizes = []
    compute = index_scores._Index._fill

    def counted(index, out, keys, sample, at):
        sizes.append((at.stop - at.start, len(keys)))
        compute(index, out, keys, sample, at)

    monkeypatch.setattr(chosen_keys, "SCORES", 0)
    monkeypatch.setattr(index_scores, "KEYS", 16)
    monkeypatch.setattr(index_scores, "TILE", -(-7 * 16 * MANY["index_n_heads"] // torch.get_num_threads()))
    monkeypatch.setattr(index_scores._Index, "_fill", counted)
    return sizes


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "hy_v4", "mistral_large4", "dots3_note", "axk2"])
def test_an_indexer_in_tiles(family, side, tiles):
    """Outputs and gradients are those of eager mode."""
    real = _padded(side).bool()
    results = []
    for model in _many_heads(family):
        out = model(input_ids=_tokens(), attention_mask=_padded(side), use_cache=False)
        out = out.logits if "logits" in out else out.last_hidden_state
        out[real].sin().sum().backward()
        results.append((out[real], torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])))
    assert max(tiles) == (7, 42)
    assert min(tiles) == (1, TOKENS)
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=1e-5)
    assert relative_error(results[1][1], results[0][1]) <= 1e-5


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["deepseek_v32", "hy_v4"])
def test_an_indexer_in_tiles_over_a_cache(family, kind, tiles):
    """The cache holds the same keys afterwards: later tokens get the same."""
    logits = []
    for model in _many_heads(family):
        cache = DynamicCache(config=model.config)
        if kind == "static":
            cache = StaticCache(config=model.config, max_cache_len=TOKENS + 5)
        parts = []
        start = 0
        with torch.no_grad():
            for size in (20, 1, 17, 5):
                tokens = _tokens()[:, start : start + size]
                parts.append(model(tokens, past_key_values=cache, use_cache=True).logits)
                start += size
        logits.append(torch.cat(parts, 1))
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)
    assert tiles


@pytest.mark.parametrize("family", ["deepseek_v32", "hy_v4"])
def test_an_indexer_in_tiles_in_half_precision(family, tiles):
    """Under autocast, and with weights in bfloat16: no further from float32 than in eager mode."""
    eager, ours = _many_heads(family)
    with torch.no_grad():
        exact = eager(_tokens()).logits
        with torch.autocast("cpu", torch.bfloat16):
            errors = [relative_error(model(_tokens()).logits, exact) for model in (eager, ours)]
        assert 1e-4 < errors[1] < 1.5 * errors[0]
        errors = [relative_error(model.bfloat16()(_tokens()).logits.float(), exact) for model in (eager, ours)]
        assert 1e-4 < errors[1] < 1.5 * errors[0]
    assert tiles


@pytest.mark.parametrize("packed", [False, True])
def test_an_indexer_that_scores_one_query_after_another(packed, monkeypatch):
    """Qwen4's lists are the same where its code is unknown, so that its own loop over queries runs."""
    model = build("qwen4_exp", NAME)
    inputs = {"input_ids": _tokens(), "attention_mask": _padded("left")}
    if packed:
        positions = torch.cat([torch.arange(17), torch.arange(TOKENS - 17)])[None].expand(2, -1)
        inputs = {"input_ids": _tokens(), "position_ids": positions, "use_cache": False}
    indexer = next(module for module in model.modules() if type(module).__name__.endswith("Indexer"))
    lists = []
    indexer.register_forward_hook(lambda module, args, out: lists.append(out.lists.sort(-1, descending=True).values))
    with torch.no_grad():
        model(**inputs)
        monkeypatch.setattr(chosen_keys, "_QWEN4_FORM", ("something else",))
        model(**inputs)
    width = lists[1].shape[3]
    assert torch.equal(lists[0][..., :width], lists[1])
    assert (lists[0][..., width:] == -1).all()


def test_an_indexer_lists_the_keys_that_score_most(tiles):
    """The lists are those of the indexer's own forward, up to their order, in every row that has as many keys. Others
    name all keys of their slice: the mask hides those after the query."""
    model = _many_heads("deepseek_v32")[1]
    indexer = model.model.layers[0].self_attn.indexer
    x = torch.randn(2, TOKENS, 32)
    angles = torch.randn(1, TOKENS, 8)
    inputs = (x, torch.randn(2, TOKENS, 16), (angles.cos(), angles.sin()))
    rows = Rows(Shown(True, queries=TOKENS, keys=TOKENS))
    found = indexer(*inputs, rows, None).sort(-1).values
    expected = type(indexer).forward(indexer, *inputs, ~~rows, None).sort(-1).values
    assert torch.equal(found[:, 7:], expected[:, 7:])
    assert torch.equal(found[:, 2], torch.arange(-1, 7, dtype=torch.int32).expand(2, -1))


def _unlike(keys):
    yield lambda: keys.softmax(-1)
    yield lambda: keys + 1
    yield lambda: torch.matmul(torch.randn(1, 2, 3, 4), keys)
    products = torch.matmul(torch.randn(1, 2, 3, 4), keys.transpose(-1, -2).float().unsqueeze(1))
    yield lambda: products * -1.0
    yield lambda: torch.sigmoid(products)
    yield lambda: torch.matmul(torch.randn(1, 2, 1, 3), products)
    index = torch.matmul(torch.randn(1, 2, 1, 3), torch.nn.functional.relu(products))
    yield lambda: index.topk(1)
    yield lambda: index.masked_fill(torch.zeros(2, 2, dtype=torch.bool), -torch.inf)
    yield lambda: index.sum(-1)


def test_an_unknown_way_to_score_keys_is_refused():
    for operation in _unlike(index_scores.IndexKeys(torch.randn(1, 2, 4))):
        with pytest.raises((UnsupportedError, TypeError)):
            operation()


@pytest.mark.parametrize("family", CHOOSING)
def test_another_implementation_gets_its_own_code_back(family):
    """Equal, bit for bit; and a copy of a model serves itself."""
    eager, ours = build(family, "eager"), build(family, NAME)
    ours.load_state_dict(eager.state_dict())
    with torch.no_grad():
        expected = ours(_tokens())[0]
        for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            ours.get_input_embeddings().weight.add_(1.0)
            assert torch.equal(copied(_tokens())[0], expected)
            ours.load_state_dict(eager.state_dict())
        ours.set_attn_implementation("eager")
        assert torch.equal(ours(_tokens())[0], eager(_tokens())[0])
        ours.set_attn_implementation(NAME)
        assert torch.equal(ours(_tokens())[0], expected)


def test_blocks_of_keys_are_trained():
    """MiniMax-M3 with padding on the right: loss and gradients, also with checkpointing."""
    mask = _padded("right")
    batch = {"input_ids": _tokens(), "attention_mask": mask, "labels": _tokens().where(mask.bool(), -100)}
    gradients = []
    for implementation in ("eager", NAME):
        model = build("minimax_m3_vl", implementation).train()
        model.load_state_dict(build("minimax_m3_vl", "eager").state_dict())
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable()
            model.zero_grad()
            model(**batch, use_cache=False).loss.backward()
            gradients.append(torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None]))
    assert torch.equal(gradients[2], gradients[3])
    assert relative_error(gradients[2], gradients[0]) <= 1e-5


def test_blocks_that_do_not_count_from_the_start_are_refused():
    model = build("minimax_m3_vl", NAME)
    with pytest.raises(UnsupportedError, match="pad on the right; got padding before tokens"):
        model(_tokens(), attention_mask=_padded("left"))
    positions = torch.cat([torch.arange(17), torch.arange(TOKENS - 17)])[None]
    with pytest.raises(UnsupportedError, match="pad on the right; got packed samples"):
        model(_tokens(), position_ids=positions, use_cache=False)


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl", "qwen4_exp"])
def test_chosen_keys_are_not_dilated(family):
    model = build(family, "eager")
    for layers in ("all", "full"):
        with pytest.raises(UnsupportedError, match="chooses the keys of each query"):
            dilate(model, [16], [1], layers=layers)
    assert model.config._attn_implementation == "eager"
    with torch.no_grad():
        expected = model(_tokens()).logits
        model.set_attn_implementation(NAME)
        torch.testing.assert_close(model(_tokens()).logits, expected, rtol=0, atol=1e-5)


def test_compressed_keys_without_their_bias_are_refused():
    """Something else has overridden the compressor's forward, which then keeps no bias."""
    model = build("deepseek_v4", NAME)
    for module in model.modules():
        if type(module).__name__.endswith("Compressor"):
            del module.__dict__["forward"]
    with pytest.raises(UnsupportedError, match="has compressed keys"):
        model(_tokens(400))
