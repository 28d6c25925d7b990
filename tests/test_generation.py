"""The KV cache against the full forward, and sampling."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from dilated_attention.models import (
    BlockMixture,
    IndexedKeys,
    KeyValueCache,
    LongNetConfig,
    LongNetLM,
    NativeSparse,
    sample,
)
from dilated_attention.patterns import Dilated, Window

SMALL = LongNetConfig(
    vocab_size=31, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, pattern=Dilated((8, 24), (1, 3))
)
PATTERNS = {
    "two branches": SMALL,
    "rate over heads": dataclasses.replace(SMALL, pattern=Dilated((8, 48, 30), (1, 8, 5))),
    "no branch of rate 1": dataclasses.replace(SMALL, pattern=Dilated((16, 32), (2, 4))),
    "head groups": dataclasses.replace(SMALL, pattern=Dilated((8, 24), (1, 3), head_groups=True), num_kv_heads=None),
    "table": dataclasses.replace(SMALL, pattern=Dilated((8, 12), (2, 5), ((1, -1), (4, 3)))),
    "dense": dataclasses.replace(SMALL, pattern=None),
    "torchscale, sub-LN, xPos": dataclasses.replace(
        SMALL, compat="torchscale", positions="xpos", xpos_scale_base=4.0, sub_ln=True, bias=True, num_kv_heads=None
    ),
    "window": dataclasses.replace(SMALL, pattern=Window(9)),
    "window, both sides given": dataclasses.replace(SMALL, pattern=Window(30, 4)),
    "dilated window": dataclasses.replace(SMALL, pattern=Window(5, rate=3)),
    "window and leading tokens": dataclasses.replace(SMALL, pattern=Window(3, rate=2, leading=11), positions="xpos"),
    "window and dilated": dataclasses.replace(SMALL, pattern=Window(7, leading=2) + Dilated((24,), (3,))),
    "indexed keys": dataclasses.replace(SMALL, selection=IndexedKeys(top_k=7, index_heads=2), positions="xpos"),
    "mixture of blocks": dataclasses.replace(SMALL, selection=BlockMixture(block_size=8, top_k=2, query_block=2)),
    "native sparse": dataclasses.replace(
        SMALL,
        selection=NativeSparse(
            compress_block=4, compress_stride=2, block_size=8, num_selected=3, window=5, query_block=4
        ),
    ),
    "no positions": dataclasses.replace(SMALL, positions=None, tie_embeddings=False, final_norm=False),
}


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def model_of(config) -> LongNetLM:
    return LongNetLM(config).double().eval()


@pytest.mark.parametrize("config", PATTERNS.values(), ids=PATTERNS.keys())
@pytest.mark.parametrize("prompt", [1, 29])
def test_decoding_equals_the_forward_at_every_position(config, prompt):
    model = model_of(config)
    tokens = torch.randint(31, (3, 80))
    with torch.no_grad():
        expected = model(tokens)
    logits, cache = model.prefill(tokens[:, :prompt], max_len=80)
    for position in range(prompt, 80):
        close(logits, expected[:, position - 1])
        assert cache.positions == [position] * 3
        logits = model.decode(tokens[:, position], cache)
    close(logits, expected[:, -1])


@pytest.mark.parametrize(
    "config",
    [
        PATTERNS["rate over heads"],
        PATTERNS["torchscale, sub-LN, xPos"],
        PATTERNS["window and leading tokens"],
        PATTERNS["window and dilated"],
        PATTERNS["indexed keys"],
        PATTERNS["native sparse"],
    ],
)
def test_ragged_prompts(config):
    model = model_of(config)
    tokens = torch.randint(31, (4, 60))
    lengths = [1, 23, 23, 30]
    with torch.no_grad():
        expected = model(tokens)
    prompts = tokens[:, :30].clone()
    for row, length in zip(prompts, lengths, strict=True):
        row[length:] = 30
    logits, cache = model.prefill(prompts, lengths=torch.tensor(lengths))
    for step in range(30):
        at = torch.tensor(lengths) + step
        close(logits, expected[torch.arange(4), at - 1])
        logits = model.decode(tokens[torch.arange(4), at], cache)
    generated = model.generate(prompts, 5, lengths=lengths, temperature=0.0)
    assert generated.shape == (4, 35)
    for row, length in zip(generated, lengths, strict=True):
        alone = model.generate(row[None, :length], 5, temperature=0.0)
        assert torch.equal(row[: length + 5], alone[0])
        assert not row[length + 5 :].any()


def test_the_cache_is_bounded():
    layers, heads, head_dim = 2, 2, 8
    cache = KeyValueCache(SMALL, 3)
    assert cache.nbytes == 2 * layers * 3 * (8 + 8) * heads * head_dim * 4
    long = dataclasses.replace(SMALL, pattern=Dilated((8, 1 << 30), (1, 1 << 20)))
    assert KeyValueCache(long, 1).nbytes == 2 * layers * (8 + 1024) * heads * head_dim * 4
    assert KeyValueCache(long, 1, max_len=6).nbytes == 2 * layers * (6 + 1) * heads * head_dim * 4
    groups = dataclasses.replace(PATTERNS["head groups"], pattern=Dilated((8, 24), (1, 3), head_groups=True))
    assert KeyValueCache(groups, 1, dtype=torch.bfloat16).nbytes == 2 * layers * (2 * 8 + 2 * 8) * head_dim * 2
    window = dataclasses.replace(SMALL, pattern=Window(5, rate=3, leading=7))
    assert KeyValueCache(window, 1).nbytes == 2 * layers * (6 * 3 + 7) * heads * head_dim * 4
    assert KeyValueCache(window, 1, max_len=10).nbytes == 2 * layers * (10 + 7) * heads * head_dim * 4
    selecting = model_of(PATTERNS["indexed keys"]).prefill(torch.zeros(2, 9, dtype=torch.int64))[1]
    assert 2 * layers * 2 * 9 * heads * head_dim * 8 < selecting.nbytes < 6 * layers * 2 * 9 * heads * head_dim * 8
    with pytest.raises(ValueError, match="max_len=None: dense attention"):
        KeyValueCache(PATTERNS["dense"], 1)
    with pytest.raises(ValueError, match=r"max_len.*got 0"):
        KeyValueCache(SMALL, 1, max_len=0)
    model = model_of(SMALL)
    _, cache = model.prefill(torch.zeros(1, 4, dtype=torch.int64), max_len=5)
    model.decode(torch.zeros(1, dtype=torch.int64), cache)
    with pytest.raises(ValueError, match="6 tokens do not fit a cache of max_len=5"):
        model.decode(torch.zeros(1, dtype=torch.int64), cache)
    with pytest.raises(ValueError, match=r"tokens must be \(1,\)"):
        model.decode(torch.zeros(2, dtype=torch.int64), cache)


def test_decoding_far_out_with_xpos():
    """The powers of xPos leave float64 at 40,000 tokens of scale_base 4, unless the origin follows.

    Positions 24 and later begin segments of every branch, so that where they lie changes nothing.
    """
    config = PATTERNS["torchscale, sub-LN, xPos"]
    model = model_of(config)
    tokens = torch.randint(31, (1, 48))
    _, cache = model.prefill(tokens[:, :24])
    cache.positions = [40_008]  # 39,984 more, a multiple of every segment
    shifted, reference = [], []
    for position in range(24, 48):
        shifted.append(model.decode(tokens[:, position], cache))
    _, cache = model.prefill(tokens[:, :24])
    for position in range(24, 48):
        reference.append(model.decode(tokens[:, position], cache))
    assert torch.stack(shifted).isfinite().all()
    close(torch.stack(shifted), torch.stack(reference))
    with pytest.raises(ValueError, match=r"xPos with scale_base=4\.0 cannot hold positions"):
        model(torch.zeros(1, 8_000, dtype=torch.int64))
    with torch.no_grad():
        assert model(torch.zeros(1, 4_000, dtype=torch.int64)).isfinite().all()  # 2,000 from the middle


def test_sampling():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).expand(4000, 4)
    generator = torch.Generator().manual_seed(0)

    def shares(**options):
        return torch.bincount(sample(logits, generator=generator, **options), minlength=4) / 4000

    torch.testing.assert_close(shares(), logits[0].softmax(-1), rtol=0, atol=0.03)
    torch.testing.assert_close(shares(temperature=2.0), (logits[0] / 2).softmax(-1), rtol=0, atol=0.03)
    for temperature in (0, 1e-40, 5e-324):
        assert shares(temperature=temperature)[1] == 1
    two = torch.tensor([0, 1.0, 0, 0.3679]) / 1.3679
    torch.testing.assert_close(shares(top_k=2), two, rtol=0, atol=0.03)
    # 0.644, 0.237, 0.087, 0.032: two reach 0.7, the first alone 0.6
    torch.testing.assert_close(shares(top_p=0.7), two, rtol=0, atol=0.03)
    assert shares(top_p=0.6)[1] == 1
    torch.testing.assert_close(shares(top_k=99, top_p=1.0), logits[0].softmax(-1), rtol=0, atol=0.03)
    for wrong, message in (
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k.*got 0"),
        ({"top_k": 2.5}, r"top_k.*got 2\.5"),
        ({"top_p": 0.0}, r"top_p=0\.0"),
        ({"top_p": 1.5}, r"top_p=1\.5"),
    ):
        with pytest.raises(ValueError, match=message):
            sample(logits, **wrong)


def test_streaming_and_stopping():
    model = model_of(SMALL)
    tokens = torch.randint(31, (2, 6))
    greedy = model.generate(tokens, 8, temperature=0.0)
    streamed = list(model.stream(tokens, 8, temperature=0.0))
    assert torch.equal(torch.stack(streamed, 1), greedy[:, 6:])
    stop = int(greedy[0, 8])
    first = [row.tolist().index(stop) if stop in row else 8 for row in greedy[:, 6:]]
    ended = model.generate(tokens, 8, temperature=0.0, stop_token=stop)
    assert ended.shape[1] == 6 + min(8, max(first) + 1)
    for row, full, at in zip(ended[:, 6:], greedy[:, 6:], first, strict=True):
        assert torch.equal(row[: at + 1], full[: at + 1][: len(row)])
        assert (row[at:] == stop).all()
    with pytest.raises(ValueError, match=r"max_new_tokens.*got -1"):
        model.generate(tokens, -1)
    with pytest.raises(ValueError, match="empty prompt"):
        model.generate(tokens, 3, lengths=[6, 0])
    for wrong in (31, -1, 1.5, [3]):  # nothing would ever stop
        with pytest.raises(ValueError, match="stop_token must be an integer from 0 to 30; got"):
            model.generate(tokens, 3, stop_token=wrong)
    padding = torch.tensor([[False] * 6, [False] * 2 + [True] * 4])
    assert torch.equal(model.generate(tokens, 0, lengths=[6, 2]), tokens.masked_fill(padding, 0))


def test_half_precision_cache():
    model = LongNetLM(SMALL).bfloat16().eval()
    tokens = torch.randint(31, (1, 40))
    with torch.no_grad():
        expected = model(tokens).float()
    logits, cache = model.prefill(tokens[:, :20])
    assert cache.dtype == torch.bfloat16
    for position in range(20, 40):
        logits = model.decode(tokens[:, position], cache)
    torch.testing.assert_close(logits.float(), expected[:, -1], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("config", [SMALL, PATTERNS["dense"]], ids=["dilated", "dense"])
def test_autocast(config):
    """The cache holds what the projections give, and 16 rows and more go to the fused operator."""
    model = LongNetLM(config).eval()
    tokens = torch.randint(31, (2, 40))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(tokens).float()
        logits, cache = model.prefill(tokens[:, :20], max_len=40)
        assert cache.dtype == torch.bfloat16
        for position in range(20, 40):
            logits = model.decode(tokens[:, position], cache)
    torch.testing.assert_close(logits.float(), expected[:, -1], rtol=0.1, atol=0.1)


def test_many_samples():
    """A token of each of many samples is no transposed batch."""
    tokens = torch.zeros(300, 4, dtype=torch.int64)
    assert LongNetLM(SMALL).eval().generate(tokens, 2).shape == (300, 6)


@pytest.mark.parametrize("config", PATTERNS.values(), ids=PATTERNS.keys())
def test_prompts_read_in_inference_mode(config):
    """And continued outside of it, or the other way round."""
    model = model_of(config)
    tokens = torch.randint(31, (2, 30))
    expected = model(tokens)[:, 9:]
    for reading, writing in ((True, False), (False, True)):
        with torch.inference_mode(reading):
            logits, cache = model.prefill(tokens[:, :10], max_len=30)
        with torch.inference_mode(writing):
            for position in range(10, 30):
                close(logits, expected[:, position - 10])
                logits = model.decode(tokens[:, position], cache)


@pytest.mark.parametrize("config", PATTERNS.values(), ids=PATTERNS.keys())
def test_a_configuration_is_read_back(config):
    assert LongNetConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ('{"terms": []}', "a list of 2 to 1,024 patterns"),
        ('{"terms": [{"before": 1}, {"before": 1}]}', "missing field after, leading, rate"),
        ('{"terms": 3}', "a list of 2 to 1,024 patterns"),
        ('{"before": -1, "after": 0, "rate": 1, "leading": 0}', "before must be an integer of at least 0|before"),
        ('{"before": 1e3, "after": 0, "rate": 1, "leading": 0}', "before"),
        ('{"before": 1000000000000000, "after": 0, "rate": 1, "leading": 0}', "are more than"),
    ],
)
def test_a_pattern_in_a_file_that_is_none(pattern, words):
    fields = json.loads(SMALL.to_json()) | {"pattern": json.loads(pattern)}
    with pytest.raises(ValueError, match=words):
        LongNetConfig.from_json(json.dumps(fields))


def test_windows_have_no_padding_of_torchscale():
    with pytest.raises(ValueError, match=r"compat='torchscale': needs a pattern of Dilated"):
        dataclasses.replace(SMALL, pattern=Window(3), compat="torchscale")
