"""Modules and models over a mesh of real processes, alone and under DDP, FSDP2 and tensor parallelism."""

from __future__ import annotations

import copy
import io
import os
import re
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import processes
from dilated_attention import (
    BlockLayout,
    Dilated,
    Window,
    attention,
    block_sparse_attention,
    dilated_attention,
    explain,
)
from dilated_attention.errors import ContextParallelError, UnsupportedError
from dilated_attention.integrations import convert_attention
from dilated_attention.models import (
    GigaPathConfig,
    GigaPathSlideEncoder,
    LongNetAttention,
    LongNetConfig,
    LongNetEncoder,
    LongNetLM,
    LongViT,
    LongViTConfig,
)
from dilated_attention.nn import (
    BlockAttentionMixture,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    TransformerBlock,
)
from dilated_attention.parallel import (
    cp_mean,
    exchange_plan,
    sequence_range,
    set_context_parallel,
    shard_labels,
    shard_sequence,
    unshard_sequence,
)
from dilated_attention.parallel.comm import link_of
from dilated_attention.parallel.sharding import fetched, from_rank
from tolerances import TOLERANCE, relative_error

SEGMENTS, RATES = (16, 40, 90), (1, 2, 3)


def difference(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    return {name: relative_error(found[name], right[name]) for name in right}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def _window(length: int) -> BlockLayout:
    return BlockLayout.local(length, 20, 16)


def modules():
    """Every module over a mesh against itself on one device: outputs, and gradients of inputs and parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    x = torch.randn(2, 91, 16, dtype=torch.float64)
    cotangent = torch.randn_like(x)
    answers = {}

    def compare(
        name: str, module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], seq_len: int | None = None
    ) -> None:
        results = []
        for where in (None, mesh):
            set_context_parallel(module, where, seq_len=seq_len)
            whole = x.clone().requires_grad_()
            out = call(module, whole if where is None else shard_sequence(whole, mesh))
            module.zero_grad()
            out.backward(cotangent if where is None else shard_sequence(cotangent, mesh))
            if where is not None:
                out = unshard_sequence(out.detach(), mesh, seq_len=91)
                for tensor in (whole, *module.parameters()):
                    dist.all_reduce(tensor.grad)
            results.append({"out": out.detach(), "dx": whole.grad.clone(), **gradients(module)})
        answers[name] = max(difference(results[1], results[0]).values())

    def heads(module: nn.Module, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, 4))
        return module(q, q.flip(-1), q, is_causal=True, seq_len=91).flatten(-2)

    def multihead(module: nn.Module, x: Tensor) -> Tensor:
        return module(x, x, x, is_causal=True, seq_len=91)[0]

    compare("ring", RingDilatedAttention(SEGMENTS, RATES), heads)
    compare("block ring", BlockSparseRingDilatedAttention(_window), heads)
    compare("block ring dilated", BlockSparseRingDilatedAttention(_window, SEGMENTS, RATES), heads)
    options = {"segment_lengths": SEGMENTS, "dilation_rates": RATES, "dtype": torch.float64}
    compare("multihead", MultiheadDilatedAttention(16, 4, **options), multihead)
    block = BlockSparseRingMultiheadDilatedAttention(16, 4, layout=_window, dtype=torch.float64)
    compare("block multihead", block, multihead)
    layer = LongNetAttention(config(embed_dim=16, positions="xpos")).double()
    compare("attention of a layer", layer, lambda module, x: module(x, is_causal=True, seq_len=91))
    layer = LongNetAttention(config(embed_dim=16, pattern=None)).double()
    compare("dense attention of a layer", layer, lambda module, x: module(x, seq_len=91))
    block = TransformerBlock(16, 4, 2, 32, None).double()
    compare("dense block that is not told the length", block, lambda module, x: module(x, is_causal=True), 91)
    compare("several", nn.Sequential(_Residual(), _Residual()), lambda module, x: module(x))
    return answers


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiheadDilatedAttention(
            16, 4, segment_lengths=SEGMENTS, dilation_rates=RATES, dtype=torch.float64
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, is_causal=True, seq_len=91)[0]


@pytest.mark.parametrize("size", [2, 3])
def test_modules_give_what_they_give_on_one_device(size: int) -> None:
    for answers in processes.run(size, modules):
        assert max(answers.values()) <= TOLERANCE[torch.float64], answers


def config(**changes) -> LongNetConfig:
    shape = {"embed_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "pattern": Dilated(SEGMENTS, RATES)}
    return LongNetConfig(**shape | changes)


def model_of(configuration: LongNetConfig) -> LongNetLM:
    torch.manual_seed(5)
    return LongNetLM(configuration).double()


def language_models():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tokens = torch.randint(256, (2, 92), generator=torch.Generator().manual_seed(1))
    answers = {}
    for name, changes in {"dilated": {}, "dense": {"pattern": None}}.items():
        model = model_of(config(**changes))
        model.loss(tokens).backward()
        right = {"loss": model.loss(tokens).detach(), "logits": model(tokens[:, :-1]).detach(), **gradients(model)}
        model.zero_grad()
        set_context_parallel(model, mesh)
        loss = model.loss(tokens)
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= mesh.size()
        logits = model(shard_sequence(tokens[:, :-1], mesh), seq_len=91).detach()
        found = {"loss": loss.detach(), "logits": unshard_sequence(logits, mesh, seq_len=91), **gradients(model)}
        answers[name] = max(difference(found, right).values())
        set_context_parallel(model, mesh, seq_len=91)
        logits = model(shard_sequence(tokens[:, :-1], mesh)).detach()
        answers[name, "told once"] = relative_error(unshard_sequence(logits, mesh, seq_len=91), right["logits"])
        set_context_parallel(model, None)
        answers[name, "and back"] = relative_error(model.loss(tokens).detach(), right["loss"])
    with pytest.raises(ValueError, match="holds no attention of this library"):
        set_context_parallel(nn.Linear(2, 2), mesh)
    return answers


def image_models():
    """Models of whole images and slides: refused whole; their encoders take shards of what they embed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    encoder = config(vocab_size=None, num_layers=1, positions=None)
    torch.manual_seed(5)
    vit = LongViT(LongViTConfig(image_size=32, patch_size=4, encoder=encoder)).eval()
    slides = GigaPathSlideEncoder(GigaPathConfig(in_chans=8, slide_ngrids=40, encoder=encoder)).eval()
    tiles, coords = torch.randn(1, 60, 8), torch.randint(0, 40 * 256, (1, 60, 2))
    images = torch.randn(1, 3, 32, 32)
    patches = vit.patches(images).flatten(2).mT + vit.positions
    answers = []
    calls = {vit: (lambda: vit(images), patches), slides: (lambda: slides.tokens(tiles, coords)[0], None)}
    for model, (call, rows) in calls.items():
        right, rows = call(), slides.embed(tiles, coords)[0] if rows is None else rows
        words = f"^{type(model).__name__} with a mesh is not supported: .*set_context_parallel\\(model.encoder, mesh\\)"
        with pytest.raises(UnsupportedError, match=words):
            set_context_parallel(model, mesh)
        set_context_parallel(model.encoder, mesh)
        with pytest.raises(UnsupportedError, match=words):
            call()
        own, length = shard_sequence(rows, mesh), rows.shape[1]
        for part in (model.encoder, model.encoder.blocks[-1]):
            with pytest.raises(UnsupportedError, match="first_only with a mesh is not supported"):
                part(own, seq_len=length, first_only=True)
        found = model.encoder(own, seq_len=length)
        answers.append(relative_error(unshard_sequence(found.detach(), mesh, seq_len=rows.shape[1]), right.detach()))
        set_context_parallel(model, None)
        assert torch.equal(call(), right)
    return answers


def test_models_of_whole_images_are_refused_and_their_encoders_are_not() -> None:
    for answers in processes.run(2, image_models):
        assert max(answers) <= TOLERANCE[torch.float32], answers


def generation():
    """Prompts of any length over a mesh, one of them without a token for every rank, against one device."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tokens = torch.randint(256, (2, 91), generator=torch.Generator().manual_seed(1))
    for changes in ({}, {"pattern": None}, {"positions": "xpos"}):
        model = model_of(config(**changes))
        for length in (2, 50, 80, 91):
            set_context_parallel(model, None)
            right, cache = model.prefill(tokens[:, :length], max_len=120)
            expected = model.generate(tokens[:, :length], 20, temperature=0)
            set_context_parallel(model, mesh)
            logits, own = model.prefill(tokens[:, :length], max_len=120)
            assert relative_error(logits, right) <= TOLERANCE[torch.float64]
            assert own.positions == cache.positions
            for found, layer in zip(own.layers, cache.layers, strict=True):
                for (*_, k, v), (*_, right_k, right_v) in zip(found.buffers, layer.buffers, strict=True):
                    assert relative_error(k, right_k) <= TOLERANCE[torch.float64]
                    assert relative_error(v, right_v) <= TOLERANCE[torch.float64]
            assert model.generate(tokens[:, :length], 20, temperature=0).equal(expected)
    drawn = model.generate(tokens, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
    set_context_parallel(model, None)
    assert drawn.equal(model.generate(tokens, 20, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.thorough)])
def test_generation_over_a_mesh(size: int) -> None:
    processes.run(size, generation)


def apart():
    """Ranks that continue different prompts, by different numbers, or train on different tokens; then one leaves."""
    torch.manual_seed(0)
    rank, mesh = dist.get_rank(), dist.group.WORLD
    model = LongNetLM(LongNetConfig(embed_dim=16, num_layers=1, num_heads=2, pattern=Dilated((8, 64), (1, 2)))).eval()
    set_context_parallel(model, mesh)
    tokens, messages = torch.arange(12)[None], []
    other = tokens + (rank == 1)
    for call in (
        lambda: model.generate(other, 4),
        lambda: model.generate(tokens, 4 + (rank == 1)),
        lambda: model.loss(other),
        lambda: model.loss(tokens, lengths=[12 - (rank == 1)]),
    ):
        with pytest.raises(ValueError, match="rank 1 has") as caught:
            call()
        messages.append(str(caught.value))
    stream = model.stream(tokens, 4)
    next(stream)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    with pytest.raises(ContextParallelError) as lost:
        list(stream)
    return [*messages, str(lost.value)]


def test_ranks_that_call_a_model_apart_are_told() -> None:
    kind, messages = processes.World(2, apart, timeout=3.0).outcomes(30, [0])[0]
    assert kind == "result", messages
    assert "rank 1 has tokens=(1, 12) " in messages[0]
    assert "rank 1 has max_len=17, elsewhere max_len=16" in messages[1]
    assert "rank 1 has tokens=(1, 12) " in messages[2]
    assert "rank 1 has counts=[10], elsewhere counts=[11]" in messages[3]
    assert "no word within 1 s from rank 1" in messages[4]


@pytest.mark.parametrize("size", [2, 3])
def test_language_models_know_where_their_shard_lies(size: int) -> None:
    for answers in processes.run(size, language_models):
        assert max(answers.values()) <= TOLERANCE[torch.float64], answers


def data_and_context():
    """Two samples over two data ranks, each sharded over two context ranks, with uneven labels, against one device."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    everyone, context = mesh["data", "context"]._flatten("data_context"), mesh["context"]
    tokens = torch.randint(256, (2, 91), generator=torch.Generator().manual_seed(2))
    labels = torch.where(torch.arange(91) < torch.tensor([[30], [80]]), tokens, -100)  # few in sample 0
    model = model_of(config())
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    F.cross_entropy(model(tokens).flatten(0, 1), shifted.flatten()).backward()
    right = gradients(model)
    mine = slice(mesh["data"].get_local_rank(), mesh["data"].get_local_rank() + 1)
    shard, own = shard_sequence(tokens[mine], context), shard_labels(labels[mine], context)

    def step(forward: Callable[..., Tensor]) -> None:
        total = F.cross_entropy(forward(shard, seq_len=91).flatten(0, 1), own.flatten(), reduction="sum")
        cp_mean(total, (own != -100).sum(), everyone).backward()

    answers = {}
    replicated = model_of(config())
    set_context_parallel(replicated, context)
    step(DistributedDataParallel(replicated, process_group=everyone.get_group()))
    answers["DDP"] = max(difference(gradients(replicated), right).values())
    for checkpointed in (False, True):
        sharded = model_of(config())
        set_context_parallel(sharded, context)
        for block in sharded.blocks:
            if checkpointed:
                block.forward = _checkpointed(block.forward)
            fully_shard(block, mesh=everyone)
        fully_shard(sharded, mesh=everyone)
        step(sharded)
        found = {name: p.grad.full_tensor() for name, p in sharded.named_parameters()}
        answers["FSDP2", checkpointed] = max(difference(found, right).values())
    return answers


def _checkpointed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    from torch.utils.checkpoint import checkpoint

    return lambda *arguments, **options: checkpoint(forward, *arguments, use_reentrant=False, **options)


def test_data_and_context_axes_under_ddp_and_fsdp2() -> None:
    for answers in processes.run(4, data_and_context):
        assert max(answers.values()) <= TOLERANCE[torch.float64], answers


def tensor_and_context():
    """Heads over one axis, tokens over the other: each rank holds a corner of q, k and v."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "context"))
    context, part = mesh["context"], mesh["tensor"].get_local_rank()
    torch.manual_seed(7)
    q, k, v = (torch.randn(1, 91, heads, 4, dtype=torch.float64) for heads in (12, 6, 6))
    right = dilated_attention(q, k, v, SEGMENTS, RATES, is_causal=True)
    own = [shard_sequence(x, context)[:, :, part * n : (part + 1) * n] for x, n in ((q, 6), (k, 3), (v, 3))]
    out = dilated_attention(*own, SEGMENTS, RATES, is_causal=True, mesh=context, seq_len=91, head_offset=3 * part)
    return relative_error(out, shard_sequence(right, context)[:, :, part * 6 : (part + 1) * 6])


def test_tensor_parallel_heads_keep_their_offsets() -> None:
    assert max(processes.run(4, tensor_and_context)) <= TOLERANCE[torch.float64]


def compiled(names):
    """Public calls in one graph; what compares or gathers between two graphs."""
    if torch.__version__ < (2, 9):  # it takes rows of a number that is data for a dynamic shape
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(9)
    leaves = [shard_sequence(torch.randn(1, 91, 4, 8), mesh).clone().requires_grad_() for _ in range(3)]
    layout = _window(91)
    mixture = BlockAttentionMixture(32, 4, block_size=8, top_k=2, query_block=4)
    set_context_parallel(mixture, mesh, seq_len=91)
    calls = {
        "mixture": lambda *x: mixture(sum(x).flatten(2)).sin(),
        "gathered": lambda *x: cp_mean(unshard_sequence(sum(x), mesh, seq_len=91).sin(), 91, mesh),
        "dilated": lambda *x: dilated_attention(*x, SEGMENTS, RATES, mesh=mesh, seq_len=91, is_causal=True),
        "blocks": lambda *x: block_sparse_attention(*x, layout, mesh=mesh, seq_len=91),
        "product": lambda *x: attention(*x, Dilated((96,), (1,)) * layout, mesh=mesh, seq_len=91, is_causal=True),
        "bfloat16": lambda *x: dilated_attention(*(y.bfloat16() for y in x), SEGMENTS, RATES, mesh=mesh, seq_len=91),
    }
    answers, broken = {}, ("mixture", "gathered")
    for name in names:
        call, results = calls[name], []
        for function in (call, torch.compile(call, fullgraph=name not in broken, backend="aot_eager")):
            out = function(*leaves)
            results.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
        answers[name] = all(map(torch.equal, *results))
    return answers


@pytest.mark.parametrize(
    "names",
    [
        ("blocks", "product", "gathered"),
        *(pytest.param(x, marks=pytest.mark.thorough) for x in (("dilated", "bfloat16"), ("mixture",))),
    ],
    ids=str,
)
def test_public_calls_compile_in_one_graph(names) -> None:
    """`test_composes` of test_parallel.py compiles dilated attention by every transport."""
    for answers in processes.run(2, compiled, names):
        assert all(answers.values()), answers


def functional_transforms():
    mesh = dist.group.WORLD
    torch.manual_seed(11)
    q, k, v = (shard_sequence(torch.randn(1, 40, 4, 8, dtype=torch.float64), mesh).clone() for _ in range(3))

    def loss(q, k, v):
        return dilated_attention(q, k, v, SEGMENTS, RATES, mesh=mesh).square().sum()

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    right = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = dilated_attention(*(x.float() for x in (q, k, v)), SEGMENTS, RATES, mesh=mesh).dtype
    out = loss(*leaves)
    (first,) = torch.autograd.grad(out, leaves[:1], create_graph=True)
    with pytest.raises(ValueError, match="second derivatives of context parallel attention"):
        first.sum().backward()
    return all(map(torch.equal, found, right)), half


def test_torch_func_autocast_and_second_derivatives() -> None:
    assert processes.run(2, functional_transforms) == [(True, torch.bfloat16)] * 2


def explained():
    mesh = dist.group.WORLD
    q = torch.empty(1, 128, 12, 64, device="meta", dtype=torch.bfloat16)
    pattern = Dilated((64, 128, 256), (1, 2, 4))
    found = explain(q, q, q, pattern, is_causal=True, mesh=mesh)
    wanted = exchange_plan(pattern, 256, 12, 2, dist.get_rank(), is_causal=True, transport=found.transport.transport)
    blocks = explain(q, q, q, BlockLayout.local(256, 64), mesh=mesh, transport="ring")
    return str(found), found.exchange == wanted, blocks.transport.transport, blocks.exchange.rounds


def explained_samples():
    """A padded batch, of which one sample ends in the first shard."""
    mesh, lengths, pattern = dist.group.WORLD, [250, 90, 0], Dilated((64, 128, 256), (1, 2, 4))
    q = torch.empty(3, 128, 12, 64, device="meta", dtype=torch.bfloat16)
    found = explain(q, q, q, pattern, mesh=mesh, lengths=lengths, transport="exchange")
    chosen = explain(q, q, q, pattern, mesh=mesh, lengths=lengths)
    plans = [
        exchange_plan(pattern, n, 12, 2, dist.get_rank(), bounds=tuple([min(edge, n) for edge in (0, 128, 256)]))
        for n in lengths
    ]
    sums = [
        sum([getattr(plan, name) for plan in plans]) == getattr(found.exchange, name)
        for name in ("rows_sent", "rows_received", "peers_sent", "rounds", "bytes_sent", "backward_bytes_received")
    ]
    assert found.transport.reason == "asked for by name"
    return sums, found.exchange.shard, found.flops, chosen.transport.reason


def test_explain_adds_up_the_samples_of_a_padded_batch() -> None:
    ranks = processes.run(2, explained_samples)
    q = torch.empty(3, 256, 12, 64, device="meta", dtype=torch.bfloat16)
    whole = explain(q, q, q, Dilated((64, 128, 256), (1, 2, 4)), lengths=[250, 90, 0])
    assert sum([flops for _, _, flops, _ in ranks]) == whole.flops
    for (sums, shard, _, reason), right in zip(ranks, [(0, 128), (128, 256)], strict=True):
        assert all(sums), sums
        assert shard == right
        assert reason.startswith("each sample chooses for itself; the longest, of 250 tokens: least modelled time")


def test_explain_says_what_travels_and_why() -> None:
    for rank, (text, equal, transport, rounds) in enumerate(processes.run(2, explained)):
        assert equal
        assert (transport, rounds) == ("ring", 1)
        for words in (
            r"transport \w+: least modelled time",
            "not all_gather: ",
            f"exchange  rank {rank} of 2, forward",
        ):
            assert re.search(words, text), text


def bad_calls():
    """Return what each bad call raises on this rank; every one on a group of its own, before and after a good call."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    q, summed = torch.randn(1, 16, 3, 4), Window(3) + BlockLayout.local(32, 4, 16)

    def attend(mesh, x=q, **options):
        return dilated_attention(x, x, x, (8, 32), (1, 2), mesh=mesh, **options)

    attempts = {
        "one rank's dims": lambda mesh: attend(mesh, q[0] if rank == 1 else q),
        "everyone's dims": lambda mesh: attend(mesh, q[0]),
        "one rank's shard": lambda mesh: attend(mesh, q[:, :7] if rank == 1 else q, seq_len=32),
        "everyone's shard": lambda mesh: attend(mesh, q[:, :7], seq_len=32),
        "seq_len": lambda mesh: attend(mesh, seq_len=-4),
        "heads": lambda mesh: attend(mesh, transport="ulysses"),
        "transport": lambda mesh: attend(mesh, q[:, rank - 1 :], seq_len=31, transport="doubling"),
        "mask": lambda mesh: attend(mesh, key_padding_mask=torch.zeros(1, 7, dtype=torch.bool)),
        "one rank's mask": lambda mesh: attend(
            mesh, key_padding_mask=torch.zeros(1, 16, dtype=torch.bool) if rank == 1 else None
        ),
        "lengths and dropout": lambda mesh: attend(mesh, lengths=[20], seq_len=32, dropout_p=0.1),
        "one rank's lengths": lambda mesh: attend(mesh, lengths=[33 if rank == 1 else 20], seq_len=32),
        "everyone's lengths": lambda mesh: attend(mesh, lengths=[-1], seq_len=32),
        "one rank's transport": lambda mesh: attend(mesh, seq_len=32, transport="ulysses" if rank == 1 else "auto"),
        "one rank's dropout": lambda mesh: attention(q, q, q, summed, mesh=mesh, dropout_p=0.1 * rank),
        "one rank's sinks": lambda mesh: attention(q, q, q, summed, mesh=mesh, sinks=torch.zeros(3 + rank)),
        "backend": lambda mesh: attend(mesh, backend="reference"),
        "layout": lambda mesh: attention(q, q, q, BlockLayout.local(16, 4, 16), mesh=mesh),
        "layouts differ": lambda mesh: attention(q, q, q, BlockLayout.local(32, 1 + 16 * rank, 16), mesh=mesh),
    }
    answers = {}
    for name, attempt in attempts.items():
        try:
            attempt(dist.new_group([0, 1]))
        except ValueError as error:
            answers[name] = str(error)
    return answers


def test_bad_calls_give_one_clear_error_on_every_rank_before_any_data_moves() -> None:
    expected = {
        "one rank's dims": "rank 1 refused its context parallel call, before any data moved: q must have 4 dimensions",
        "everyone's dims": "^q must have 4 dimensions",
        "one rank's shard": "rank 1 refused .*: q has 7 tokens; rank 1's shard of seq_len=32",
        "everyone's shard": "q has 7 tokens; rank 0's shard of seq_len=32 over 2 ranks",
        "seq_len": "^seq_len must be a non-negative integer",
        "heads": "transport='ulysses' does not serve this call: .* 3 query and 3 key-value heads do not divide by 2",
        "transport": "transport='doubling' does not serve this call: doubling needs equal shards",
        "mask": r"^key_padding_mask must have shape \(batch, seq\) = \(1, 16\); got \(1, 7\)",
        "one rank's mask": "the ranks .* call with different arguments: rank . has key_padding_mask=",
        "lengths and dropout": "^dropout_p with lengths over a mesh is not supported; pack the batch: cu_seqlens",
        "one rank's lengths": r"rank 1 refused .*: lengths must lie in \[0, 32\], .*; got \[33\]",
        "everyone's lengths": r"^lengths must lie in \[0, 32\], .*; got \[-1\]",
        "one rank's transport": "rank 1 refused .*: transport='ulysses' does not serve this call",
        "one rank's dropout": r"the ranks .* call with different arguments: rank \d has dropout",
        "one rank's sinks": "rank 1 refused .*: sinks must be a floating tensor of 3 logits",
        "backend": "^backend='reference' sees one device",
        "layout": "^layout is for 16 tokens, got seq_len=32",
        "layouts differ": r"the ranks .* call with different arguments: rank \d has layouts=",
    }
    for answers in processes.run(2, bad_calls):
        assert answers.keys() == expected.keys()
        for name, pattern in expected.items():
            assert re.search(pattern, answers[name]), (name, answers[name])


def fetching() -> tuple[bool, bool, int]:
    """Return whether every second token and the last and their gradients are right, and the bytes that they took."""
    rank = dist.get_rank()
    whole = torch.randn(2, 11, 3, generator=torch.Generator().manual_seed(1))
    bounds = (0, 3, 7, 11)
    tokens = torch.tensor([*range(rank, 10, 2), 10])
    shard = whole[:, bounds[rank] : bounds[rank + 1]].clone().requires_grad_()
    traffic = link_of(dist.group.WORLD).traffic
    before = traffic.bytes_received
    found = fetched(shard, tokens, bounds, dist.group.WORLD, "fetching")
    moved = traffic.bytes_received - before
    found.sum().backward()
    every = torch.cat([torch.tensor([*range(first, 10, 2), 10]) for first in range(3)])
    times = every.bincount(minlength=11).float()
    own = times[bounds[rank] : bounds[rank + 1]]
    return found.equal(whole[:, tokens]), shard.grad.equal(own[None, :, None].expand_as(shard)), moved


def test_some_tokens_of_other_ranks() -> None:
    """Each of two peers sends 1 to 3 rows of 24 bytes, and one byte per token to say which rows it wants itself."""
    for right, gradient, moved in processes.run(3, fetching):
        assert right
        assert gradient
        assert moved <= 2 * (3 * 24 + 24) + 2 * (11 + 22)


def later_refusal(transport):
    """Make a wrong call on one rank after good ones: the other, already past comparing, learns why it stays away."""
    q = torch.randn(1, 16, 4, 4, requires_grad=True)  # else the ranks compare whether one wants gradients
    options = {"mesh": dist.group.WORLD, "transport": transport, "layer": "decoder.3"}
    dilated_attention(q, q, q, (32,), (1,), **options)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="q must have 4 dimensions"):
            dilated_attention(q[0], q[0], q[0], (32,), (1,), **options)
        time.sleep(50)  # its end would tell the other
        return ""
    with pytest.raises(ContextParallelError) as caught:
        dilated_attention(q, q, q, (32,), (1,), **options)
    return str(caught.value)


def test_a_refusal_after_good_calls_reaches_those_who_wait() -> None:
    """It comes long before the group's timeout, whatever the transport."""
    worlds = {t: processes.World(2, later_refusal, t, timeout=60) for t in ("exchange", "ring", "doubling")}
    for transport, world in worlds.items():
        kind, message = world.outcomes(40, [0])[0]
        assert kind == "result", (transport, message)
        assert "rank 1 refused the call: q must have 4 dimensions" in message
        assert f"rank 0 of 2 in decoder.3, {transport} of 32 tokens, branches 32/1" in message


def refused_ahead():
    """Rank 2 is late; rank 0, which waits for nobody, has meanwhile refused the call after, as all ranks do."""
    q = torch.randn(1, 8, 2, 4)
    options = {"mesh": dist.group.WORLD, "transport": "ring", "is_causal": True}
    with torch.no_grad():
        attention(q, q, q, Window(3), **options)
        dist.barrier()
        if dist.get_rank() == 2:
            time.sleep(3)
        attention(q, q, q, Window(3), **options)
        with pytest.raises(ValueError, match="q must have 4 dimensions"):
            attention(q[0], q[0], q[0], Window(3), **options)
        dist.barrier()
        return attention(q, q, q, Window(3), **options).isfinite().all().item()


def test_a_refusal_leaves_the_call_before_it_alone() -> None:
    assert processes.run(3, refused_ahead) == [True] * 3


def ranges():
    mesh = dist.group.WORLD
    for bad in (-1, 2.5, True):
        with pytest.raises(ValueError, match="seq_len must be a non-negative integer"):
            sequence_range(bad, mesh)
    with pytest.raises(ValueError, match="x has 3 rows in dim 1"):
        unshard_sequence(torch.zeros(1, 3), mesh, seq_len=7 if dist.get_rank() else 9)
    rank, answers = dist.get_rank(), []
    for rows, seq_len in ((3 + rank, None), (3 + rank, 6 + rank), (3 + rank, 7 - 8 * rank), (3, 6 if rank else 7)):
        with pytest.raises(ValueError, match="seq_len") as caught:
            unshard_sequence(torch.full((1, rows), float(rank)), mesh, seq_len=seq_len)
        answers.append(str(caught.value))
    both: list = [None] * 2
    dist.all_gather_object(both, answers)
    assert both[0] == both[1], both
    words = [
        "rank 1 has seq_len=8",
        "rank 1 has seq_len=7",
        "rank 1 refused",
        "rank 1 has seq_len=6, elsewhere seq_len=7",
    ]
    for found, wanted in zip(answers, words, strict=True):
        assert wanted in found, found
    assert unshard_sequence(torch.full((1, 3), float(rank)), mesh).tolist() == [[0.0] * 3 + [1.0] * 3]
    own = torch.full((2,), float(rank))
    assert from_rank(1, own, mesh).tolist() == [1.0, 1.0]
    assert own.tolist() == [rank] * 2
    with pytest.raises(ValueError, match='gradients must be "mean" or "sum"'):
        cp_mean(torch.zeros(()), 1, mesh, gradients="none")
    with warnings.catch_warnings(record=True) as caught:
        link_of(mesh)
    return sequence_range(7, mesh), len(caught)


def test_ranges() -> None:
    assert processes.run(2, ranges) == [((0, 3), 0), ((3, 7), 0)]


def trained_with_dropout():
    """The states of a sequence of uneven shards, and the random state that is left, where all ranks begin alike."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(5)
    model = LongNetEncoder(config(vocab_size=None, embed_dim=16, dropout=0.3, attention_dropout=0.2)).double().train()
    x = torch.randn(2, 91, 16, dtype=torch.float64)
    set_context_parallel(model, mesh)
    states = model(shard_sequence(x, mesh), seq_len=91)
    return unshard_sequence(states, mesh, seq_len=91).detach().numpy(), torch.get_rng_state().numpy()


def test_dropout_does_not_depend_on_the_ranks():
    """Dropout is a hash of places, and each rank draws one seed, so that all continue alike."""
    answers = [answer for size in (2, 3) for answer in processes.run(size, trained_with_dropout)]
    for states, random_state in answers[1:]:
        np.testing.assert_allclose(states, answers[0][0], rtol=1e-9, atol=1e-9)
        assert (random_state == answers[0][1]).all()


def copied():
    group = dist.group.WORLD
    torch.manual_seed(3)
    module = MultiheadDilatedAttention(16, 4, segment_lengths=SEGMENTS, dilation_rates=RATES)
    set_context_parallel(module, group)
    x = shard_sequence(torch.randn(1, 90, 16), group)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    expected = module(x, x, x)[0]
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert torch.equal(other(x, x, x)[0], expected)


def test_a_module_over_a_process_group_is_copied_and_saved():
    processes.run(2, copied)


def converted():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), 2).eval()
    convert_attention(model, SEGMENTS, RATES)
    x = torch.randn(2, 91, 16)
    expected = model(x)
    set_context_parallel(model, mesh, seq_len=91)
    found = unshard_sequence(model(shard_sequence(x, mesh)), mesh, seq_len=91)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_converted_encoder_has_uneven_shards():
    processes.run(2, converted)


def ragged_language_model():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    model = LongNetLM(config(embed_dim=16, vocab_size=31)).double()
    tokens, positions = torch.randint(31, (3, 91)), torch.arange(7, 98)
    edges, lengths = torch.tensor([0, 40, 40, 91]), [91, 60, 2]

    def results():
        return model(tokens, lengths=lengths), model(tokens, positions=positions), model(tokens[:1], cu_seqlens=edges)

    expected, loss = results(), model.loss(tokens, lengths)
    loss.backward()
    right = gradients(model)
    model.zero_grad()
    set_context_parallel(model, mesh)
    shard, mine = shard_sequence(tokens, mesh), shard_sequence(positions, mesh, dim=0)
    options = [(shard, {"lengths": lengths}), (shard, {"positions": mine}), (shard[:1], {"cu_seqlens": edges})]
    for (given, more), whole in zip(options, expected, strict=True):
        found = unshard_sequence(model(given, seq_len=91, **more).detach(), mesh, seq_len=91)
        torch.testing.assert_close(found, whole.detach(), rtol=1e-9, atol=1e-9)
    over = model.loss(tokens, lengths)
    torch.testing.assert_close(over, loss, rtol=1e-9, atol=1e-9)
    over.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    assert max(difference(gradients(model), right).values()) < 1e-9


def test_a_language_model_over_a_mesh_takes_lengths_positions_and_packed_samples():
    processes.run(2, ragged_language_model)


def sharded_arguments():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q = distribute_tensor(torch.randn(1, 64, 4, 4), mesh, [Shard(1)])
    with pytest.raises(ValueError, match=r"q must be a plain tensor; got a DTensor.*q\.to_local"):
        dilated_attention(q, q, q, (16,), (1,), mesh=mesh)
    model = model_of(config(vocab_size=31))
    tokens = torch.randint(31, (1, 20))
    expected = model.generate(tokens, 3, temperature=0.0)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.unshard()
    assert torch.equal(model.generate(tokens, 3, temperature=0.0), expected)


def test_what_is_sharded_by_pytorch():
    processes.run(2, sharded_arguments)


def drawn_after_sharding() -> list[float]:
    """Return the standard deviations of the rows of query, key and value, drawn in a model that FSDP2 has sharded."""
    with torch.device("meta"):
        model = LongNetLM(config(vocab_size=31, embed_dim=256, num_layers=3, num_kv_heads=4, sub_ln=True))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.to_empty(device="cpu").reset_parameters()
    parts = model.blocks[0].attention.input.weight.detach().full_tensor().split(256)
    return [float(part.std()) for part in parts]


def test_parameters_drawn_after_sharding():
    xavier = (2 / 512) ** 0.5
    for found in processes.run(2, drawn_after_sharding):
        assert found == pytest.approx([xavier, xavier, xavier * np.log(6) ** 0.5], rel=0.02)


def windowed_model() -> tuple[float, bool]:
    """Return how far a model's loss over the mesh is from one device's, and whether it writes the same tokens."""
    torch.manual_seed(0)
    pattern = Window(9, leading=2) + Dilated((32,), (4,))
    model = LongNetLM(LongNetConfig(vocab_size=31, embed_dim=32, num_layers=2, num_heads=4, pattern=pattern)).double()
    tokens = torch.randint(31, (1, 50))
    loss, written = model.loss(tokens), model.eval().generate(tokens, 6, temperature=0.0)
    set_context_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return abs(float(model.loss(tokens) - loss)), torch.equal(model.generate(tokens, 6, temperature=0.0), written)


def test_a_model_with_windows():
    assert all(distance < 1e-12 and same for distance, same in processes.run(3, windowed_model))
