"""LongNet as encoder and language model: configuration, meaning, ragged batches, files."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from dilated_attention.errors import UnsupportedError
from dilated_attention.models import (
    BlockMixture,
    GigaPathConfig,
    GigaPathSlideEncoder,
    IndexedKeys,
    LongNetAttention,
    LongNetConfig,
    LongNetEncoder,
    LongNetLM,
    LongViT,
    LongViTConfig,
    NativeSparse,
    packing,
)
from dilated_attention.nn import Rotary, TransformerBlock, rotate, transformer
from dilated_attention.nn.transformer import _ROWS
from dilated_attention.patterns import Dilated
from tolerances import TOLERANCE, relative_error

SMALL = LongNetConfig(
    vocab_size=50, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, pattern=Dilated((8, 32), (1, 4))
)
VECTORS = dataclasses.replace(SMALL, vocab_size=None)
MAGNETO = dataclasses.replace(VECTORS, sub_ln=True, bias=True, positions="xpos", num_kv_heads=None)
FAMILY = {
    "plain": VECTORS,
    "MAGNETO, xPos": MAGNETO,
    "torchscale": dataclasses.replace(MAGNETO, compat="torchscale", positions=None),
    "dense": dataclasses.replace(VECTORS, pattern=None),
    "no final norm": dataclasses.replace(VECTORS, final_norm=False, positions=None),
}


SELECTING = {
    "native": dataclasses.replace(
        SMALL,
        selection=NativeSparse(
            compress_block=4, compress_stride=2, block_size=8, num_selected=3, window=5, query_block=4
        ),
    ),
    "mixture": dataclasses.replace(SMALL, selection=BlockMixture(block_size=8, top_k=2, query_block=2), bias=True),
    "indexed": dataclasses.replace(SMALL, selection=IndexedKeys(top_k=5, index_heads=2, leading=1), positions="xpos"),
}


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


def test_an_output_of_its_own_is_called():
    """Its hooks run, and an adapter may take its place."""
    model = LongNetLM(dataclasses.replace(SMALL, tie_embeddings=False))
    tokens = torch.randint(50, (2, 12))
    seen = []
    model.output.register_forward_hook(lambda output, inputs, logits: seen.append(logits))
    logits = model(tokens)
    assert torch.equal(seen[0], logits)
    model.output = torch.nn.Sequential(model.output, torch.nn.Softplus())
    torch.testing.assert_close(model(tokens), logits.exp().log1p())


class Adapted(nn.Module):
    """Adds to what a module gives, as an adapter does; `weight` is the base's, as PEFT has it."""

    def __init__(self, base, delta):
        super().__init__()
        self.base, self.delta = base, delta

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.delta(x)


def test_an_adapter_of_a_tied_embedding_acts_on_the_output_too(model):
    tokens, base = torch.randint(50, (2, 12)), model.embedding
    model.embedding = Adapted(base, nn.Embedding(50, 32))
    logits, loss = model(tokens), model.loss(tokens)
    merged = nn.Embedding(50, 32)
    merged.weight.data = base.weight.data + model.embedding.delta.weight.data
    model.embedding = merged
    torch.testing.assert_close(logits, model(tokens))
    torch.testing.assert_close(loss, model.loss(tokens))


def test_a_tied_embedding_that_is_offloaded(model):
    accelerate = pytest.importorskip("accelerate")
    tokens = torch.randint(50, (2, 12))
    expected = model(tokens)
    torch.testing.assert_close(accelerate.cpu_offload(model, execution_device="cpu")(tokens), expected)


def test_a_loss_of_no_next_token(model):
    for shape in ((1, 1), (2, 0), (0, 5)):
        with pytest.raises(ValueError, match=rf"tokens must hold two tokens .*; got shape {re.escape(str(shape))}"):
            model.loss(torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"lengths must leave two tokens .*; got \[1, 0\]"):
        model.loss(torch.zeros(2, 5, dtype=torch.int64), lengths=[1, 0])


def test_positions_move_nothing_but_rotations(model):
    tokens = torch.randint(50, (1, 12))
    torch.testing.assert_close(model(tokens, positions=torch.arange(12)), model(tokens))
    shifted = model(tokens, positions=torch.arange(100, 112))  # rotary: only distances count
    torch.testing.assert_close(shifted, model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", FAMILY.values(), ids=FAMILY.keys())
def test_a_ragged_batch_is_each_sample_alone(config):
    model = LongNetEncoder(config).double()
    lengths = [37, 1, 50, 0, 24]
    x = torch.randn(5, 50, 32, dtype=torch.float64, requires_grad=True)
    states = model(x, lengths=lengths, all_layers=True)
    torch.testing.assert_close(model(x, lengths=torch.tensor(lengths)), states[-1])
    assert len(states) == 2 + config.num_layers
    for i, length in enumerate(lengths):
        assert not states[-1][i, length:].any()
        if length:
            alone = model(x[i : i + 1, :length], all_layers=True)
            for state, expected in zip(states, alone, strict=True):
                torch.testing.assert_close(state[i, :length], expected[0], rtol=1e-10, atol=1e-10)
    (gradient,) = torch.autograd.grad(states[-1].sin().sum(), x)
    padding = torch.arange(50) >= torch.tensor(lengths)[:, None]
    assert not gradient[padding].any()
    garbage = torch.where(padding[..., None], torch.full_like(x, torch.nan), x)
    assert torch.equal(model(garbage, lengths=lengths), model(x, lengths=lengths))


@pytest.mark.parametrize("counts", [[20, 3, 11], [7, 7]])
def test_samples_that_are_packed_already(counts):
    model = LongNetEncoder(MAGNETO).double()
    x = torch.randn(1, sum(counts), 32, dtype=torch.float64)
    packed = model(x, cu_seqlens=[0, *itertools.accumulate(counts)], all_layers=True)
    alone = [model(sample, all_layers=True) for sample in x.split(counts, 1)]
    for i, states in enumerate(packed):
        torch.testing.assert_close(states, torch.cat([layers[i] for layers in alone], 1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("config", FAMILY.values(), ids=FAMILY.keys())
def test_packs_without_gradients_change_nothing(config, monkeypatch):
    model = LongNetEncoder(config).double().eval()
    lengths = [7, 20, 3, 0, 30, 1]
    x = torch.randn(6, 30, 32, dtype=torch.float64)
    together = model(x, lengths=lengths, all_layers=True)
    monkeypatch.setattr(packing, "PACK", 25)
    sizes = []
    handle = model.blocks[0].register_forward_hook(lambda block, inputs, out: sizes.append(out.shape[1]))
    assert all(torch.equal(a, b) for a, b in zip(model(x, lengths=lengths, all_layers=True), together, strict=True))
    with torch.no_grad():
        packs = model(x, lengths=lengths, all_layers=True)
    handle.remove()
    assert sizes == [61, 7, 23, 30, 1]
    for actual, expected in zip(packs, together, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["dropout", "attention_dropout", "an adapter's"])
def test_reentrant_checkpointing_repeats_the_dropout(kind, monkeypatch):
    """Its forward runs without gradients, and draws nonetheless what the recomputation draws."""
    monkeypatch.setattr(packing, "PACK", 25)
    monkeypatch.setattr(transformer, "_ROWS", 20)
    model = LongNetEncoder(dataclasses.replace(MAGNETO, **({} if kind == "an adapter's" else {kind: 0.5}))).double()
    if kind == "an adapter's":
        for block in model.blocks:
            block.mlp[0] = nn.Sequential(nn.Dropout(0.5), block.mlp[0])
            block.mlp[2] = nn.Sequential(nn.Dropout(0.5), block.mlp[2])
    x = torch.randn(3, 30, 32, dtype=torch.float64)
    results = []
    for reentrant in (True, False):
        given = x.clone().requires_grad_()
        torch.manual_seed(0)
        out = checkpoint(lambda x: model(x, lengths=[7, 20, 30]), given, use_reentrant=reentrant)
        out.sin().sum().backward()
        results.append((out, given.grad))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second)


def test_a_ragged_batch_in_single_precision(model):
    x, lengths = torch.randn(3, 700, 32), [700, 64, 333]
    encoder = LongNetEncoder(dataclasses.replace(FAMILY["torchscale"], pattern=Dilated((128, 512), (1, 4))))
    ragged = encoder(x, lengths=lengths)
    for i, length in enumerate(lengths):
        assert (ragged[i, :length] - encoder(x[i : i + 1, :length])[0]).abs().max() <= 1e-5
    tokens = torch.randint(50, (3, 40))
    torch.testing.assert_close(model(tokens, lengths=[40, 7, 0])[1, :7], model(tokens)[1, :7], rtol=1e-4, atol=1e-5)
    losses = [model.loss(tokens[i : i + 1, :n]) * (n - 1) for i, n in ((0, 40), (1, 7))]
    torch.testing.assert_close(model.loss(tokens, lengths=[40, 7, 1]), sum(losses) / (39 + 6))


def test_positions_of_ragged_samples():
    model = LongNetEncoder(MAGNETO).double()
    x, lengths = torch.randn(2, 20, 32, dtype=torch.float64), [20, 9]
    positions = torch.stack((torch.arange(20), torch.arange(100, 120)))
    shifted = model(x, lengths=lengths, positions=positions)
    torch.testing.assert_close(shifted, model(x, lengths=lengths), rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match=r"positions must have shape \(seq,\) = \(20,\)"):
        model(x, positions=positions[:, :7])
    with pytest.raises(ValueError, match=r"xPos with scale_base=512\.0 cannot hold"):
        model(x, positions=positions * 100_000)


def test_positions_of_padding_mean_nothing():
    """The range of xPos has an end: each sample's own positions make its origin."""
    model = LongNetEncoder(MAGNETO).double()
    x, lengths = torch.randn(3, 20, 32, dtype=torch.float64), [20, 9, 0]
    positions = torch.arange(8_000_000, 8_000_020).repeat(3, 1)
    padded = positions.clone()
    padded[1, 9:], padded[2] = 0, -7
    states = model(x, lengths=lengths, positions=padded)
    for i, n in enumerate(lengths[:2]):
        alone = model(x[i : i + 1, :n], positions=positions[:1, :n])
        torch.testing.assert_close(states[i, :n], alone[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model(x, lengths=lengths, positions=positions[0]), states, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int8, torch.int32])
def test_positions_of_any_integers(dtype):
    """All integers act like int64: a uint8 less the origin is negative."""
    model = LongNetEncoder(MAGNETO).double()
    x, positions = torch.randn(1, 20, 32, dtype=torch.float64), torch.arange(107, 127)
    assert torch.equal(model(x, positions=positions.to(dtype)), model(x, positions=positions))


@pytest.mark.parametrize("config", [VECTORS, MAGNETO], ids=["rope", "xpos"])
@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)])
def test_positions_of_no_tokens(config, shape):
    x, positions = torch.zeros(*shape, 32), torch.arange(shape[1])
    for given in (positions, positions.expand(shape)):
        assert LongNetEncoder(config)(x, positions=given).shape == x.shape


@pytest.mark.parametrize("lengths", [[3, 51], [3], [3, -1], [3, 2.0], "ab"])
def test_wrong_lengths(lengths):
    with pytest.raises(ValueError, match="lengths must"):
        LongNetEncoder(VECTORS)(torch.zeros(2, 50, 32), lengths=lengths)


@pytest.mark.parametrize(
    ("config", "inputs", "message"),
    [
        (VECTORS, torch.zeros(2, 5, 31), r"inputs must be \(batch, seq, embed_dim=32\) vectors"),
        (VECTORS, torch.zeros(2, 5, dtype=torch.int64), "inputs must be .* vectors"),
        (SMALL, torch.zeros(2, 5, 32), r"inputs must be \(batch, seq\) token ids; got torch.float32"),
        (SMALL, torch.zeros(5, dtype=torch.int64), "inputs must be .* token ids"),
    ],
)
def test_wrong_inputs(config, inputs, message):
    with pytest.raises(ValueError, match=message):
        LongNetEncoder(config)(inputs)


def test_what_looks_like_seq_first_is_warned_of():
    with pytest.warns(UserWarning, match=r"\(300, 1, 32\) is read as \(batch, seq, ...\)"):
        LongNetEncoder(VECTORS)(torch.zeros(300, 1, 32))
    LongNetEncoder(VECTORS)(torch.zeros(3, 1, 32))


def test_without_gradients_the_mlp_runs_in_pieces():
    """Pieces of `_ROWS` rows, and the rest, in place: the same values, and nothing of the input is overwritten."""
    block = TransformerBlock(8, 2, 2, 16, Dilated((64,), (1,)), sub_ln=True).double()
    x = torch.randn(2, _ROWS // 2 + 77, 8, dtype=torch.float64)
    before = x.clone()
    with torch.no_grad():
        pieces = block(x)
        strided = block(x.transpose(0, 1).contiguous().transpose(0, 1))
    torch.testing.assert_close(pieces, block(x))
    torch.testing.assert_close(strided, pieces)
    assert torch.equal(x, before)


def test_what_the_pieces_of_the_mlp_read_stays():
    """A hook may keep it."""
    block = TransformerBlock(8, 2, 2, 16, Dilated((64,), (1,))).double()
    x = torch.randn(1, _ROWS + 7, 8, dtype=torch.float64)
    kept = []
    block.mlp_norm.register_forward_hook(lambda norm, inputs, out: kept.append(inputs[0].view(-1, 8)))
    block(x)
    with torch.no_grad():
        block(x)
    torch.testing.assert_close(torch.cat(kept[1:]), kept[0])


def test_in_training_the_mlp_runs_whole(monkeypatch):
    """The pieces of a forward without gradients would drop other elements than its recomputation with them."""
    block, sizes, run = TransformerBlock(8, 2, 2, 16, Dilated((64,), (1,))), [], nn.Sequential.forward
    monkeypatch.setattr(nn.Sequential, "forward", lambda mlp, x: sizes.append(x[..., 0].numel()) or run(mlp, x))
    with torch.no_grad():
        block(torch.randn(1, _ROWS + 7, 8))
        block.eval()(torch.randn(1, _ROWS + 7, 8))
    assert sizes == [_ROWS + 7, _ROWS, 7]


def test_the_pieces_of_the_mlp_under_vmap():
    """Over its weights alone: the rows, which are not mapped, cannot take the sums."""
    block = TransformerBlock(8, 2, 2, 16, Dilated((64,), (1,))).eval()
    x, weights = torch.randn(1, _ROWS + 7, 8), torch.randn(3, 8, 16)

    def run(weight):
        return torch.func.functional_call(block, {"mlp.2.weight": weight}, (x,))

    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(run)(weights), torch.stack([run(weight) for weight in weights]))


@pytest.mark.parametrize("part", ["mlp", "mlp.1", "mlp_norm"])
def test_a_hook_sees_the_mlp_whole(part):
    block, seen = TransformerBlock(8, 2, 2, 16, Dilated((64,), (1,))).eval(), []
    x = torch.randn(2, _ROWS, 8)
    expected = block(x)
    block.get_submodule(part).register_forward_hook(lambda module, inputs, out: seen.append(out.shape[:2]))
    with torch.no_grad():
        torch.testing.assert_close(block(x), expected)
    assert seen == [(2, _ROWS)]


@pytest.mark.parametrize("config", [MAGNETO, SMALL], ids=["xPos", "rotary"])
def test_packed_samples_of_a_language_model(config):
    model, counts = LongNetLM(dataclasses.replace(config, vocab_size=31)).double(), [20, 0, 3, 11]
    tokens = torch.randint(31, (1, sum(counts)))
    packed = model(tokens, cu_seqlens=torch.tensor([0, 20, 20, 23, 34]))
    alone = torch.cat([model(sample) for sample in tokens.split(counts, 1) if sample.numel()], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="cu_seqlens must ascend from 0 to 34"):
        model(tokens, cu_seqlens=[0, 30])
    with pytest.raises(UnsupportedError, match="positions with cu_seqlens"):
        model(tokens, cu_seqlens=[0, 10, 34], positions=torch.arange(34))


@pytest.mark.parametrize("ragged", [False, True])
def test_gradient_checkpointing_changes_nothing_but_what_is_kept(ragged):
    gradients, kept = [], []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = LongNetEncoder(dataclasses.replace(MAGNETO, dropout=0.3, attention_dropout=0.2)).double()
        model.gradient_checkpointing = checkpointing
        x = torch.randn(2, 40, 32, dtype=torch.float64)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            out = model(x, lengths=[40, 11] if ragged else None)
        out.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        kept.append(sum(sizes))
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)
    assert kept[1] < kept[0] / 5


@pytest.mark.parametrize("name", ["small", *SELECTING])
def test_stages_of_a_pipeline(name):
    """torch.distributed.pipelining exports a model and runs the halves of the program."""
    config = dataclasses.replace(SELECTING.get(name, SMALL), num_layers=2, tie_embeddings=False)
    model, tokens = LongNetLM(config), torch.randint(config.vocab_size, (2, 40))
    expected = model(tokens)
    learning = {name: x for name, x in model.named_parameters() if ".indexer." not in name}
    wanted = torch.autograd.grad(expected.sin().sum(), list(learning.values()))
    split = {"blocks.1": pipelining.SplitPoint.BEGINNING}
    pipe = pipelining.pipeline(model, mb_args=(tokens,), split_spec=split)
    first, second = (pipe.get_stage_module(i) for i in range(2))
    out = second(*first(tokens))  # x and the rotary tables
    torch.testing.assert_close(out, expected)
    out.sin().sum().backward()
    found = dict([*first.named_parameters(), *second.named_parameters()])
    for place, gradient in zip(learning, wanted, strict=True):
        torch.testing.assert_close(found[place].grad, gradient)


def test_magneto_initialisation():
    def std(x):
        return x.double().pow(2).mean().sqrt().item()

    config = dataclasses.replace(MAGNETO, embed_dim=256, num_layers=3, vocab_size=50)
    block, gain, xavier = LongNetEncoder(config).blocks[0], math.sqrt(math.log(2 * 3)), math.sqrt(2 / 512)
    q, k, v = block.attention.input.weight.chunk(3)
    for weight, expected in (
        (q, xavier),
        (k, xavier),
        (v, gain * xavier),
        (block.attention.output.weight, gain * xavier),
    ):
        assert std(weight) == pytest.approx(expected, rel=0.02)
    for weight in (block.mlp[0].weight, block.mlp[2].weight):
        assert std(weight) == pytest.approx(gain * math.sqrt(2 / (256 + 1024)), rel=0.02)
    assert not block.mlp[0].bias.any()


REDRAWN = dataclasses.replace(SMALL, embed_dim=128, num_layers=3, num_kv_heads=None)
REDRAWN_VECTORS = dataclasses.replace(REDRAWN, vocab_size=None, positions=None, sub_ln=True, bias=True)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (LongNetLM, REDRAWN),
        (LongNetLM, dataclasses.replace(REDRAWN, tie_embeddings=False)),
        (LongNetLM, dataclasses.replace(REDRAWN, sub_ln=True, bias=True)),
        (LongNetLM, dataclasses.replace(REDRAWN, sub_ln=True, tie_embeddings=False)),
        (LongNetLM, dataclasses.replace(REDRAWN, selection=NativeSparse())),
        (LongNetAttention, REDRAWN),
        (GigaPathSlideEncoder, GigaPathConfig(in_chans=200, encoder=REDRAWN_VECTORS)),
        (LongViT, LongViTConfig(image_size=64, patch_size=8, num_classes=20, encoder=REDRAWN_VECTORS)),
    ],
)
def test_parameters_can_be_drawn_again(kind, config):
    """Parameters of a model made on the meta device are drawn as by the constructor."""
    made = kind(config)
    with torch.device("meta"):
        model = kind(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.reset_parameters()
    assert not list(model.buffers())
    for (name, x), expected in zip(model.named_parameters(), made.parameters(), strict=True):
        mean, std = expected.mean().item(), expected.std().item()
        assert x.mean().item() == pytest.approx(mean, abs=6 * std / x.numel() ** 0.5), name
        assert x.std().item() == pytest.approx(std, rel=4 / x.numel() ** 0.5), name


def test_xpos_decays_with_the_distance_and_not_with_the_place():
    rotary = Rotary(8, scale_base=16.0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(m, n, origin):
        (m, n) = (torch.tensor([p]) for p in (m, n))
        queries, keys = (rotary.tables(p, origin, torch.float64) for p in (m, n))
        return (rotate(q, queries[:2]) * rotate(k, keys[-2:])).sum()

    torch.testing.assert_close(score(9, 4, 0), score(1009, 1004, 990), rtol=1e-9, atol=1e-9)
    plain = Rotary(8).tables(torch.tensor([5]), dtype=torch.float64)
    at_zero = Rotary(8).tables(torch.tensor([0]), dtype=torch.float64)
    decay = ((torch.arange(4) / 4 + 0.4) / 1.4) ** (5 / 16)
    expected = (rotate(q, plain) * rotate(k, at_zero) * torch.cat((decay, decay))).sum()
    torch.testing.assert_close(score(9, 4, 0), expected, rtol=1e-6, atol=1e-6)
    assert Rotary(8).reach(torch.float32) is None
    assert 31_000 < Rotary(8, scale_base=512.0).reach(torch.float32) < 34_000
    rotary.check(rotary.reach(torch.float32), torch.float32)
    far = torch.tensor([rotary.reach(torch.float32)])
    assert all(x.isfinite().all() for x in rotary.tables(far))
    with pytest.raises(ValueError, match="at most"):
        rotary.check(int(far) + 1, torch.float32)


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
    for wrong in (torch.tensor([1, 2, 3]), torch.ones(1, 3)):
        for call in (model, model.loss, model.prefill, lambda tokens: model.generate(tokens, 4)):
            with pytest.raises(ValueError, match=r"inputs must be \(batch, seq\) token ids; got torch.\w+ of shape"):
                call(wrong)
    for wrong in (torch.tensor([[1, 2, 50]]), torch.tensor([[1, 2, -1]])):
        for call in (model, model.loss, model.prefill, lambda tokens: model.generate(tokens, 4)):
            with pytest.raises(ValueError, match=r"inputs, token ids, must lie in \[0, 50\); got (50|-1)"):
                call(wrong)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_tokens_of_any_integers(model, dtype):
    tokens = torch.randint(50, (2, 20))
    narrow = tokens.to(dtype)
    assert torch.equal(model(narrow), model(tokens))
    assert torch.equal(model.loss(narrow), model.loss(tokens))
    found = model.generate(narrow, 4, temperature=0.0, lengths=[20, 7])
    assert found.dtype == dtype
    assert torch.equal(found.long(), model.generate(tokens, 4, temperature=0.0, lengths=[20, 7]))
    if dtype == torch.uint8:
        larger = LongNetLM(dataclasses.replace(SMALL, vocab_size=257))
        assert larger(narrow).shape == (2, 20, 257)
        with pytest.raises(ValueError, match=r"tokens of torch.uint8 cannot hold .* vocab_size=257: pass tokens.long"):
            larger.generate(narrow, 4)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        LongNetConfig(pattern=None),
        LongNetConfig(pattern=Dilated((4, 8), (1, 2), offsets=((0, 0, 0, 0), (0, 1, -1, 1)))),
        LongNetConfig(pattern=Dilated((4, 8), (1, 2), head_groups=True), mlp_dim=100),
        LongNetConfig.preset("longnet-base"),
        LongNetConfig.preset("longnet-base", num_layers=2, positions=None, dropout=0.1),
        FAMILY["torchscale"],
        *SELECTING.values(),
    ],
)
def test_configuration_survives_json(config):
    assert LongNetConfig.from_json(config.to_json()) == config


def test_the_paper_s_configuration():
    config = LongNetConfig.preset("longnet-base")
    assert config.pattern == Dilated((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
    assert (config.embed_dim, config.num_layers, config.num_heads, config.mlp_width) == (768, 12, 12, 3072)
    assert (config.positions, config.sub_ln) == ("xpos", True)
    model = LongNetLM.empty(config)
    blocks = sum(p.numel() for p in model.blocks.parameters())
    assert 85e6 < blocks < 86e6
    with pytest.raises(ValueError, match="preset='base': must be one of longnet-base"):
        LongNetConfig.preset("base")


def test_files_of_the_first_version_still_load(model, folder):
    names = ("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "mlp_dim", "pattern", "rope_base")
    edit_config(folder, lambda f: [f.pop(name) for name in set(f) - set(names)])
    loaded = LongNetLM.from_pretrained(folder)
    assert loaded.config == SMALL
    blocks = {name.removeprefix("blocks.0.") for name in loaded.state_dict() if name.startswith("blocks.0.")}
    assert blocks == {
        *("attention_norm.weight", "attention_norm.bias", "attention.input.weight", "attention.output.weight"),
        *("mlp_norm.weight", "mlp_norm.bias", "mlp.0.weight", "mlp.2.weight"),
    }


def test_a_file_says_that_its_tensors_are_of_pytorch(folder):
    """accelerate reads no other."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"architecture": "LongNetLM", "format": "pt"}


def test_saved_and_loaded(model, folder):
    loaded = LongNetLM.from_pretrained(folder)
    assert not any(module.training for module in loaded.modules())
    assert loaded.config == SMALL
    tokens = torch.randint(50, (1, 40))
    assert torch.equal(loaded(tokens), model(tokens))
    assert sorted(path.name for path in folder.iterdir()) == ["SHA256SUMS", "config.json", "model.safetensors"]
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
        ({"positions": "learned"}, "positions='learned'"),
        ({"xpos_scale_base": 0}, "xpos_scale_base=0"),
        ({"sub_ln": 1}, "sub_ln must be a bool; got 1"),
        ({"norm_eps": 0.0}, r"norm_eps=0\.0"),
        ({"dropout": 1.0}, r"dropout=1\.0: must be a number of at least 0 and below 1"),
        ({"attention_dropout": "0.1"}, r"attention_dropout='0\.1'"),
        ({"compat": "longnet"}, "compat='longnet'"),
        ({"selection": "native"}, "selection='native': must be a NativeSparse, a BlockMixture, an IndexedKeys or None"),
        ({"selection": NativeSparse(), "sub_ln": True}, "sub_ln=True: modules that select have none"),
        ({"compat": "torchscale", "pattern": None}, "compat='torchscale': needs a pattern"),
        ({"embed_dim": 36, "num_heads": 8, "positions": None}, "multiple of num_heads=8$"),
    ],
)
def test_wrong_configuration(changes, message, unchecked):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize("make", [NativeSparse, BlockMixture])
def test_a_wrong_selection(make, unchecked):
    with pytest.raises(ValueError, match="query_block=3 must divide block_size=8"):
        make(block_size=8, query_block=3, **({"compress_stride": 8} if make is NativeSparse else {}))
    with pytest.raises(ValueError, match="block_size='8': must be a positive integer"):
        make(block_size="8")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 0}, "top_k=0: must be a positive integer"),
        ({"leading": -1}, "leading=-1: must be a positive integer"),
        ({"recent": True}, "recent=True: must be a positive integer"),
        ({"leading": False}, "leading must be a non-negative integer; got False"),
        ({"top_k": 3, "leading": 3}, "top_k=3 is less than leading=3 and recent=1 together"),
    ],
)
def test_wrong_indexed_keys(fields, message, unchecked):
    with pytest.raises(ValueError, match=message):
        IndexedKeys(**fields)


@pytest.mark.parametrize("config", SELECTING.values(), ids=SELECTING)
def test_a_model_that_selects(config, tmp_path):
    """It trains, reads no later token, computes each sample alone, padded and packed, and survives a save."""
    model, tokens = LongNetLM(config).double(), torch.randint(50, (2, 40))
    loss = model.loss(tokens, lengths=[40, 23])
    if isinstance(config.selection, IndexedKeys):
        both = model.losses(tokens, lengths=[40, 23])
        torch.testing.assert_close(both[0], loss, rtol=1e-12, atol=1e-12)
        loss = both[0] + both[1]
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    changed = torch.cat([tokens[:, :20], tokens[:, 20:].flip(1)], 1)
    torch.testing.assert_close(model(changed)[:, :20], model(tokens)[:, :20], rtol=1e-12, atol=1e-12)
    found = model(tokens, lengths=[40, 23])
    torch.testing.assert_close(found[0], model(tokens[:1])[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1, :23], model(tokens[1:, :23])[0], rtol=1e-12, atol=1e-12)
    packed = model(torch.cat([tokens[:1], tokens[1:, :23]], 1), cu_seqlens=[0, 40, 63])[0]
    torch.testing.assert_close(packed, torch.cat([found[0], found[1, :23]]), rtol=1e-12, atol=1e-12)
    model.save_pretrained(tmp_path)
    assert torch.equal(LongNetLM.from_pretrained(tmp_path)(tokens), model(tokens))
    vectors = dataclasses.replace(config, vocab_size=None)
    for kind, wrong in (
        (LongNetEncoder, config),
        (GigaPathSlideEncoder, GigaPathConfig(encoder=vectors)),
        (LongViT, LongViTConfig(encoder=vectors)),
    ):
        with pytest.raises(UnsupportedError, match=r"an encoder with config\.selection is not supported"):
            kind(wrong)
    with pytest.raises(UnsupportedError, match=r"LongNetAttention with config\.selection is not supported"):
        LongNetAttention(config)


def test_the_loss_of_indexers():
    """It is each sample's own, weighted by its tokens, gives the indexers alone gradients, and falls."""
    model, tokens, lengths = LongNetLM(SELECTING["indexed"]).double(), torch.randint(50, (3, 40)), [40, 17, 3]
    alone = [model.losses(tokens[i : i + 1, :n])[1] * (n - 1) for i, n in enumerate(lengths)]
    loss = model.losses(tokens, lengths=lengths)[1]
    torch.testing.assert_close(loss, sum(alone) / 57, rtol=1e-12, atol=1e-12)
    loss.backward()
    learning = {name for name, x in model.named_parameters() if x.grad is not None}
    assert learning == {name for name, _ in model.named_parameters() if ".indexer." in name}
    optimizer = torch.optim.Adam([x for name, x in model.named_parameters() if name in learning], lr=3e-2)
    for _ in range(10):
        optimizer.zero_grad()
        model.losses(tokens, lengths=lengths)[1].backward()
        optimizer.step()
    assert model.losses(tokens, lengths=lengths)[1] < 0.8 * loss
    with pytest.raises(ValueError, match="losses needs layers with indexers"):
        LongNetLM(SELECTING["mixture"]).losses(tokens)


def edit_config(folder, edit):
    fields = json.loads((folder / "config.json").read_text())
    edit(fields)
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "SHA256SUMS").unlink()


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
    (folder / "SHA256SUMS").unlink()  # as in a folder from elsewhere
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
    with pytest.raises(ValueError, match=r"model.safetensors: cannot be read \(No such file"):
        LongNetLM.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: configuration: not JSON"):
        LongNetLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"nowhere.config.json: cannot be read"):
        LongNetLM.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16])
def test_weights_of_one_floating_dtype(model, folder, dtype):
    (folder / "SHA256SUMS").unlink()
    path = folder / "model.safetensors"
    weights = load_file(path)
    for names in (["norm.weight"], list(weights)[1:]):
        save_file(weights | {x: weights[x].to(dtype) for x in names}, path, {"architecture": "LongNetLM"})
        with pytest.raises(ValueError, match=rf"model.safetensors: weights must share .* {dtype}.*model.to\(dtype"):
            LongNetLM.from_pretrained(folder)
    save_file({x: tensor.long() for x, tensor in weights.items()}, path, {"architecture": "LongNetLM"})
    with pytest.raises(ValueError, match=r"weights must share one floating dtype; got torch.int64"):
        LongNetLM.from_pretrained(folder)
    save_file({x: tensor.half() for x, tensor in weights.items()}, path, {"architecture": "LongNetLM"})
    assert LongNetLM.from_pretrained(folder).norm.weight.dtype == torch.float16
    before = path.read_bytes()
    model.norm.half()
    with pytest.raises(ValueError, match=r"LongNetLM: weights must share .* torch.float16, torch.float32"):
        model.save_pretrained(folder)
    assert path.read_bytes() == before


def test_xpos_refuses_what_autocast_cannot_hold():
    config = LongNetConfig(
        embed_dim=32, num_layers=1, num_heads=2, positions="xpos", xpos_scale_base=4.0, pattern=Dilated((64,), (1,))
    )
    tokens = torch.zeros(1, 400, dtype=torch.int64)
    with pytest.raises(ValueError, match="float16"):
        LongNetLM(config).half()(tokens)
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="float16"):
        LongNetLM(config)(tokens)


CHANGED = {
    "compiled": lambda m: m.blocks.__setitem__(0, torch.compile(m.blocks[0], backend="eager")),
    "weight norm": lambda m: nn.utils.parametrizations.weight_norm(m.blocks[0].mlp[0]),
    "more words": lambda m: setattr(m, "embedding", nn.Embedding(40, 32)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_weights_that_could_not_be_loaded_are_not_written(name, tmp_path):
    model = LongNetLM(SMALL)
    CHANGED[name](model)
    with pytest.raises(ValueError, match=r"LongNetLM: .*unlike a model of its configuration.*LoRA"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
