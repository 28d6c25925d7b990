"""Do what errors and warnings tell users to do, to the letter: it runs, and computes what the words promise.

A case is registered under the words of one message. It makes the wrong call inside `with told():`, which checks that
these words come, and then follows them. `test_every_remedy_has_a_case` looks for remedies in the source, so that a new
one needs a case here, the name of a test elsewhere, or a reason to have neither.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import json
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import create_block_mask

import dilated_attention
import dilated_attention_lab
from dilated_attention import (
    BlockLayout,
    Dilated,
    Neighborhood,
    Window,
    attention,
    attention_weights,
    block_sparse_attention,
    explain,
    parallel,
    routing,
    suggest_pattern,
)
from dilated_attention import (
    dilated_attention as dilated,
)
from dilated_attention.backends import cpu
from dilated_attention.bias import Alibi
from dilated_attention.decoding import first_token_attention
from dilated_attention.integrations import convert_attention
from dilated_attention.models import (
    BlockMixture,
    GigaPathConfig,
    GigaPathSlideEncoder,
    IndexedKeys,
    LongNetConfig,
    LongNetEncoder,
    LongNetLM,
    load_longvit,
    load_torchscale,
    tile_attention,
)
from dilated_attention.models.generation import KeyValueCache
from dilated_attention.nn import (
    BlockAttentionMixture,
    BlockSparseDilatedAttention,
    DilatedAttention,
    MultiheadDilatedAttention,
    NativeSparseAttention,
    NeighborhoodAttention,
    NeighborhoodAttention2D,
    SelectionCache,
)
from dilated_attention.patterns import Sum
from dilated_attention.routing import PageBounds
from dilated_attention_lab.commands import main, train
from dilated_attention_lab.conversion import convert
from dilated_attention_lab.training import session
from dilated_attention_lab.training.loop import Recipe, Training
from dilated_attention_lab.training.text import read_text
from processes import run
from test_checkpoints import Golden, encoder_decoder_weights, longvit_weights
from tolerances import TOLERANCE, relative_error

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore:Sparse BSR")]

SOURCE = Path(dilated_attention.__file__).parent
LAB = Path(dilated_attention_lab.__file__).parent


class Later:
    """A module that takes seconds to import, which the ranks below do without."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.name), name)


transformers, huggingface = Later("transformers"), Later("dilated_attention.integrations.huggingface")
longformer_bigbird = Later("dilated_attention.integrations.longformer_bigbird")
PATTERN = Dilated((8, 16), (1, 2))


# ---- the table


class Told:
    """`with told():` expects an error, or a warning, with the case's words."""

    def __init__(self, words: str) -> None:
        self.words, self.heard = words, 0

    @contextmanager
    def __call__(self, kind: type[BaseException] = ValueError) -> Iterator[Any]:
        words = ".*".join(map(re.escape, self.words.split("{}")))
        expected = pytest.warns if issubclass(kind, Warning) else pytest.raises
        with expected(kind, match=f"(?s){words}") as caught:
            yield caught
        self.heard += 1

    def printed(self, text: str) -> str:
        """The same for what a command prints."""
        words = r"\s.*?".join(r"\s+".join(map(re.escape, part.split())) for part in self.words.split("{}"))
        assert re.search(words.replace(r"\s.*?", ".*?"), text, re.DOTALL), text
        self.heard += 1
        return text


CASES: dict[str, Callable] = {}
ON_TWO_RANKS: dict[str, Callable] = {}


def remedy(words: str, cases: dict[str, Callable] = CASES) -> Callable[[Callable], Callable]:
    def add(case: Callable) -> Callable:
        assert words not in CASES | ON_TWO_RANKS
        cases[words] = case
        return case

    return add


@pytest.mark.parametrize("words", CASES)
def test_following(words, request):
    told, case = Told(words), CASES[words]
    case(told, *[request.getfixturevalue(name) for name in list(inspect.signature(case).parameters)[1:]])
    assert told.heard


def _follow_on_this_rank() -> dict[str, str]:
    problems = {}
    for words, case in ON_TWO_RANKS.items():
        torch.manual_seed(0)
        told = Told(words)
        try:
            case(told, dist.group.WORLD)
            assert told.heard
        except BaseException:  # pytest's own failures are none of Exception
            problems[words] = traceback.format_exc()
    return problems


@pytest.fixture(scope="module")
def problems_on_two_ranks() -> list[dict[str, str]]:
    return run(2, _follow_on_this_rank)


@pytest.mark.parametrize("words", ON_TWO_RANKS)
def test_following_on_two_ranks(words, problems_on_two_ranks):
    for problems in problems_on_two_ranks:
        assert words not in problems, problems[words]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def tensors(seq: int = 16, heads: int = 4, *, batch: int = 1, kv_heads: int | None = None, dim: int = 8, **options):
    shapes = [(batch, seq, count, dim) for count in (heads, kv_heads or heads, kv_heads or heads)]
    return tuple(torch.randn(shape, **options) for shape in shapes)


def same(actual: Tensor, expected: Tensor) -> None:
    assert relative_error(actual, expected) <= TOLERANCE[actual.dtype]


def oracle(q: Tensor, k: Tensor, v: Tensor, pattern: Any = PATTERN, **options: Any) -> Tensor:
    return attention(q, k, v, pattern, backend="reference", **options)


def shard(x: Tensor, mesh: Any) -> Tensor:
    return parallel.shard_sequence(x, mesh)


def whole(x: Tensor, mesh: Any) -> Tensor:
    return parallel.unshard_sequence(x, mesh)


def of(caught: Any, pattern: str) -> str:
    """The part of the message that the user would copy."""
    text = str(caught.value) if hasattr(caught, "value") else str(caught[0].message)
    (found,) = re.findall(pattern, text)
    return found


# ---- what the source says

VERBS = (
    "append|ask|begin|build|call|choose|compare|construct|convert|delete|destroy|fold|generate|give|install|leave|"
    "lengthen|load|lower|make|pack|pad|pass|pip install|remove|run|save|see|set|shorten|slice|start|take|train|try|"
    "turn|unite|use"
)
REMEDY = re.compile(rf"(?:^|[;:.,)(] |\b(?:or|and|then|mesh|mask|module|meant,) )(?:{VERBS})\b", re.IGNORECASE)

FOLLOWED_ELSEWHERE = {
    "config.sliding_window = None": "test_huggingface.py::test_families_that_dilate_refuses",
    "choose a model without windows": "test_huggingface.py::test_families_that_dilate_refuses",
    'config.layer_types = ["full_attention"] * config.num_hidden_layers{}. Compare its logits':
        "test_huggingface.py::test_families_that_dilate_refuses",
    "of the model's attention; remove it from the batch":
        "test_own_attention_arguments.py::test_names_that_sdpa_ignores",
    'load the model with attn_implementation="{}"': "test_own_attention.py::test_refuses_by_name",
    'call model.set_attn_implementation("{}") on a model that is not dilated':
        "test_unpadding.py::test_models_that_are_refused",
    "make the model without its pooling layer": "test_unpadding.py::test_states_and_gradients_of_sdpa",
    "do not count from 0; use it padded": "test_unpadding.py::test_models_that_are_refused",
    "from the start of a row: pad on the right": "test_own_attention_chosen.py::test_blocks_of_keys_are_trained",
    "use the model's own attention": "test_own_attention_chosen.py::test_chosen_keys_are_not_dilated",
    "is unknown; load the model with": "test_own_attention_arguments.py::test_a_misspelt_implementation",
    "give each rank all heads, or use dilation_rates of 1": "test_own_attention_arguments.py::test_a_part_of_the_heads",
    "give it the mask that the model makes":
        "test_own_attention_arguments.py::test_a_window_that_neither_mask_nor_arguments_tell",
    "gather the sequence before the attention":
        "test_own_attention_arguments.py::test_positions_that_a_dropped_mask_told_apart",
    "give cu_seq_lens_q, or the mask that the model makes":
        "test_own_attention_arguments.py::test_bounds_of_samples_beside_a_dropped_mask",
    "give position_ids that restart with each sample":
        "test_own_attention_arguments.py::test_packed_samples_as_flash_attention_takes_them",
    "leave out attention_mask, and pass use_cache=False":
        "test_own_attention_arguments.py::test_packed_samples_as_flash_attention_takes_them",
    "give position_ids alone, which restart with each sample":
        "test_own_attention_arguments.py::test_a_block_diagonal_mask_over_pairs",
    "leave them out, or set the model's own loss":
        "test_parallel_trainers.py::test_refusals",
    "does not divide the {} ranks; start it by torchrun":
        "test_parallel_trainers.py::test_refusals",
    "things beside its loss; give prediction_loss_only=True":
        "test_parallel_trainers.py::test_trainer",
    "leave it at 1, and give the trainer context_size={}":
        "test_parallel_trainers.py::test_refusals",
    "generation of a dilated model over a mesh is not supported; leave the mesh out":
        "test_parallel_transformers.py::test_advice",
    "in packed samples, in chunks or by a rule that is not known, are not supported: leave the mesh out":
        "test_parallel_transformers.py::test_blocks_of_tokens",
    "generation of a model that chooses its keys over a mesh is not supported; leave the mesh out":
        "test_parallel_transformers.py::test_listed_keys",
    "the model has no mesh: call set_context_parallel(model, mesh) first":
        "test_parallel_transformers.py::test_generation",
    "the model is in training mode: call model.eval() first":
        "test_parallel_transformers.py::test_generation",
    "they say that the batch is a shard of a sequence: call set_context_parallel(model, mesh)":
        "test_parallel_transformers.py::test_advice",
    "call the model that set_context_parallel got":
        "test_parallel_transformers.py::test_refusals",
    "does not call this library: load it with attn_implementation":
        "test_parallel_transformers.py::test_refusals",
    "choose a model in which attention alone does":
        "test_parallel_transformers.py::test_refusals",
    "use a model that returns states or logits of each token":
        "test_parallel_transformers.py::test_other_models",
    "its weights are on the meta device: load them first":
        "test_parallel_transformers.py::test_refusals",
    "sparsify chose blocks of its prompts: call sparsify(model, None)":
        "test_parallel_transformers.py::test_advice",
    "call the model on whole sequences with use_cache=False":
        "test_parallel_transformers.py::test_advice",
    "embed them before, and give inputs_embeds":
        "test_parallel_transformers.py::test_other_models",
    "pass the images of the whole batch on every rank":
        "test_parallel_transformers.py::test_blocks_of_tokens",
    "embed it before, and give inputs_embeds":
        "test_parallel_transformers.py::test_advice",
    "the balance loss of experts is a mean over all tokens; leave it out":
        "test_parallel_transformers.py::test_advice",
    "leave labels out, and give cp_mean the sum of the losses and their number":
        "test_parallel_transformers.py::test_advice",
    "a dilated pattern counts the tokens that it keeps: pad on the right":
        "test_parallel_transformers.py::test_training",
    "packed samples in a dilated model; pad them, give attention_mask":
        "test_parallel_transformers.py::test_training",
    "give input_ids or inputs_embeds, (batch, shard, ...)":
        "test_parallel_transformers.py::test_refusals",
    "which tell a shard from a whole text: use shard_batch(batch, mesh)":
        "test_parallel_transformers.py::test_refusals",
    "the label of the last token is on the next rank; use shard_batch":
        "test_parallel_transformers.py::test_refusals",
    "lengthen the table with extend_positions(model, length)":
        "test_parallel_transformers.py::test_advice",
    "is shorter than the {} ranks of the mesh; pad it":
        "test_parallel_transformers.py::test_batches",
    "give a mask over tokens, or position_ids that restart with each packed sample":
        "test_parallel_transformers.py::test_batches",
    "position_ids do not restart where cu_seq_lens_q begins a sample: give one of them alone":
        "test_parallel_transformers.py::test_batches",
    "pip install ./lab": "test_package.py::test_the_library_says_where_its_commands_are",
    "--resume continues": "test_cli.py::test_control_c_in_a_terminal",
    "choose refused its heads on rank {}": "test_parallel_choice.py::test_what_is_refused_is_refused_on_every_rank",
    "see its error there": "test_parallel_choice.py::test_what_is_refused_is_refused_on_every_rank",
    "call replace_attention before fully_shard":
        "test_longformer_bigbird.py::test_it_may_be_replaced_twice_but_not_after_another_class",
    "run under torchrun": "test_train_ranks.py::test_command_under_torchrun",
    "Destroy it, start the lost ranks again (torchrun does) and resume":
        "test_train_faults.py::test_all_ranks_start_again_with_the_store_of_those_that_were_lost",
}  # fmt: skip

NOT_FOLLOWED = {
    "pip install triton": "installs a package",
    "then ask for it by name": "needs a GPU",
    "run `dilated-attention bench cpu --share` on such a machine": "needs an arm64 processor",
    "install g++ or clang++": "installs a compiler",
    "ask its owner": "needs another user",
    "use FSDP, or DeepSpeed's engine with shard_batch": "needs DeepSpeed, which the tests run on its own",
    "the compiled kernels {}; run {}": "compiles for a minute; conftest.py does it",
    "run one rank of": "describes a command",
    "train a byte-level language model": "describes a command",
    "convert a torchscale, GigaPath or LongViT checkpoint, and": "describes a command",
}


def texts(tree: ast.AST) -> Iterator[str]:
    """The strings of a module without docstrings and the help of options; values in f-strings become {}."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("add_parser", "add_argument", "option", "flag")
        ):
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            for part in node.values:
                yield from texts(part)
        else:
            yield from texts(node)


def test_every_remedy_has_a_case():
    said = {
        text: f"{file.name}: {text}"
        for root in (SOURCE, LAB)
        for file in sorted(root.rglob("*.py"))
        if "bench" not in file.relative_to(root).parts
        for text in texts(ast.parse(file.read_text(encoding="utf-8")))
    }
    known = {**CASES, **ON_TWO_RANKS, **FOLLOWED_ELSEWHERE, **NOT_FOLLOWED}
    patterns = {words: re.compile(".*".join(map(re.escape, words.split("{}"))), re.DOTALL) for words in known}
    found = {text: [words for words, pattern in patterns.items() if pattern.search(text)] for text in said}
    elsewhere = [place.split("::") for place in FOLLOWED_ELSEWHERE.values()]
    remedies = [text for text in said if REMEDY.search(text) and len(text.split()) > 2]
    assert not [said[text] for text in remedies if not found[text]]
    assert all(f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8") for file, name in elsewhere)
    assert not known.keys() - {words for several in found.values() for words in several}


# ---- calls


@remedy("the kernels have no {}; use float32, bfloat16 or float16")
def _(told):
    q, k, v = tensors(dtype=torch.float64)
    with told():
        attention(q, k, v, PATTERN, backend="cpu")
    if cpu._load()[2]:
        pytest.skip("the kernels are not compiled here")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        narrow = [x.to(dtype) for x in (q, k, v)]
        same(attention(*narrow, PATTERN, backend="cpu"), oracle(*(x.double() for x in narrow)))


@remedy("has no kernel for {}; use float32")
def _(told):
    eight = [x.to(torch.float8_e5m2) for x in tensors()]
    with told():
        attention(*eight, PATTERN, backend="native")
    wide = [x.float() for x in eight]
    same(attention(*wide, PATTERN, backend="native"), oracle(*(x.double() for x in wide)))


@remedy("have no place in {}; use float32")
def _(told):
    eight = [x.to(torch.float8_e5m2) for x in tensors()]
    with told():
        oracle(*eight)
    wide = [x.float() for x in eight]
    same(oracle(*wide), oracle(*(x.double() for x in wide)))


@remedy('use backend="native" or a shorter sequence')
def _(told):
    q, k, v = tensors(40_000, 1)
    with told():
        oracle(q, k, v)
    shorter = [x[:, :1600] for x in (q, k, v)]
    same(attention(q, k, v, PATTERN, backend="native")[:, :1600], oracle(*shorter))


@remedy("needs a mesh; use transport='auto'")
def _(told):
    q, k, v = tensors()
    with told():
        attention(q, k, v, PATTERN, transport="ring")
    same(attention(q, k, v, PATTERN, transport="auto"), oracle(q, k, v))


@remedy("on one device must be q's own length, {}; leave it out")
def _(told, one_rank):
    q, k, v = tensors()
    for mesh in (None, one_rank):
        with told():
            attention(q, k, v, PATTERN, mesh=mesh, seq_len=32)
        same(attention(q, k, v, PATTERN, mesh=mesh), oracle(q, k, v))


@remedy("give q.transpose(1, 2), k.transpose(1, 2) and v.transpose(1, 2)")
def _(told):
    q, k, v = (x.transpose(1, 2) for x in tensors(512, 4))
    with told(UserWarning):
        attention(q, k, v, PATTERN)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    same(attention(q, k, v, PATTERN), oracle(q, k, v))


@remedy("must have a floating dtype; got {}: give {}.float()")
def _(told):
    q, k, v = (x.round().long() for x in tensors())
    with told():
        attention(q, k, v, PATTERN)
    q, k, v = (x.float() for x in (q, k, v))
    same(attention(q, k, v, PATTERN), oracle(q, k, v))


@remedy("got a nested one: give torch.nested.to_padded_tensor({}, 0.0) and lengths=")
def _(told):
    parts = [tensors(n) for n in (40, 64)]
    nested = [
        torch.nested.nested_tensor([x[0] for x in part], layout=torch.jagged) for part in zip(*parts, strict=True)
    ]
    with told():
        attention(*nested, PATTERN)
    out = attention(*(torch.nested.to_padded_tensor(x, 0.0) for x in nested), PATTERN, lengths=[40, 64])
    for i, part in enumerate(parts):
        same(out[i : i + 1, : part[0].shape[1]], oracle(*part))


@remedy("got layout {}: give {}.to_dense()")
def _(told):
    q, k, v = tensors()
    sparse = k.to_sparse()
    with told():
        attention(q, sparse, v, PATTERN)
    same(attention(q, sparse.to_dense(), v, PATTERN), oracle(q, k, v))


@remedy("is of dilated patterns; leave it out with {}")
def _(told):
    q, k, v = tensors()
    layout = BlockLayout.local(16, 4, 4)
    with told():
        explain(q, k, v, layout, compat="torchscale")
    assert explain(q, k, v, layout).flops == layout.flops(16, 4, 8)


@remedy('call with backend="reference", which differentiates any number of times, forward and backward')
def _(told):
    q, k, v = tensors(6, 2, dim=2, dtype=torch.float64)

    def ours(q, backend="auto"):
        return attention(q, k, v, PATTERN, backend=backend).square().sum()

    leaf = q.clone().requires_grad_()
    with told(NotImplementedError):
        (gradient,) = torch.autograd.grad(ours(leaf), leaf, create_graph=True)
        torch.autograd.grad(gradient.square().sum(), leaf)
    assert torch.autograd.gradgradcheck(lambda q: ours(q, "reference"), leaf)
    assert torch.autograd.gradcheck(lambda q: ours(q, "reference"), leaf, check_forward_ad=True)


@remedy("give q[:, :1]")
def _(told):
    q, k, v = tensors()
    with told():
        first_token_attention(q, k, v, PATTERN)
    same(first_token_attention(q[:, :1], k, v, PATTERN), oracle(q, k, v)[:, :1])


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * q.shape[3] ** -0.5
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.double())


@remedy("give attention the whole sequence")
def _(told):
    q, k, v = tensors()
    layout = BlockLayout.local(16, 5, 4)
    with told():
        first_token_attention(q[:, :1], k, v, layout)
    same(attention(q, k, v, layout)[:, :1], oracle(q, k, v, layout)[:, :1])


@remedy("mesh under torch.func.vmap: fold the mapped dimension into the batch", ON_TWO_RANKS)
def _(told, mesh):
    q, k, v = (x.unflatten(0, (3, 1)) for x in tensors(batch=3))
    mine = [shard(x.flatten(0, 1), mesh).unflatten(0, (3, 1)) for x in (q, k, v)]
    with told():
        torch.func.vmap(lambda q, k, v: attention(q, k, v, PATTERN, mesh=mesh))(*mine)
    out = attention(*(x.flatten(0, 1) for x in mine), PATTERN, mesh=mesh)
    same(whole(out, mesh), oracle(*(x.flatten(0, 1) for x in (q, k, v))))


@remedy("it reads values, which vmap hides; give the mapped dimension as part of the batch")
def _(told):
    q, k, v = (x.unflatten(0, (3, 1)) for x in tensors(64, batch=3))
    with told():
        torch.func.vmap(lambda q, k: routing.topk_blocks(q, k, 0.5, block_size=8).counts)(q, k)
    folded = [x.flatten(0, 1) for x in (q, k, v)]
    layout = routing.topk_blocks(*folded[:2], 0.5, block_size=8)
    same(attention(*folded, layout), oracle(*folded, layout))


@remedy("fold the mapped dimension into the batch instead")
def _(told):
    q, k, v = (x.unflatten(0, (3, 1)) for x in tensors(batch=3))
    lengths, product = torch.tensor([[16], [11], [5]]), PATTERN * (lambda length: BlockLayout.local(length, length, 4))
    folded = [x.flatten(0, 1) for x in (q, k, v)]
    for pattern, backend in ((product, "auto"), (PATTERN, "reference")):

        def call(q, k, v, lengths, pattern=pattern, backend=backend):
            return attention(q, k, v, pattern, lengths=lengths, backend=backend)

        with told():
            torch.func.vmap(call)(q, k, v, lengths)
        same(call(*folded, lengths.flatten()), oracle(*folded, lengths=[16, 11, 5]))


class Exported(nn.Module):
    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, PATTERN, backend=self.backend)


@remedy("use torch.export instead. For ONNX, call")
def _(told):
    inputs = tensors()
    with told():
        torch.jit.trace(Exported(), inputs)
    for backend in ("auto", "reference"):
        exported = torch.export.export(Exported(backend), inputs)
        same(exported.module()(*inputs), oracle(*inputs))


@remedy("ONNX has no operator for this attention. Before the export, call {}pass backend='reference'")
def _(told, monkeypatch):
    """`test_own_attention.py::test_onnx` runs exported files; this one needs no packages."""
    from transformers_families import build

    inputs, tokens = tensors(), _tokens(40)
    recorded = torch.export.export(Exported(), inputs)
    model = build("modernbert", huggingface.NAME).eval()
    batch = tokens, torch.ones_like(tokens)
    expected = model(*batch).last_hidden_state

    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with told():
        torch.export.export(Exported(), inputs)
    with told():
        recorded.run_decompositions()
    with told():
        torch.export.export(model, batch)
    exported = torch.export.export(Exported("reference"), inputs)
    same(exported.module()(*inputs), oracle(*inputs))
    model.set_attn_implementation("sdpa")
    exported = torch.export.export(model, batch)
    same(exported.module()(*batch).last_hidden_state, expected)


@remedy("ONNX has no operator that chooses blocks; use torch.export instead")
def _(told, monkeypatch):
    class Choosing(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, routing.topk_blocks(q, k, density=0.5, block_size=4))

    inputs = tensors()
    exported = torch.export.export(Choosing(), inputs)
    same(exported.module()(*inputs), Choosing()(*inputs))
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with told():
        torch.export.export(Choosing(), inputs)


@remedy("got a DTensor. Give {}.to_local(), this rank's shard, and mesh=", ON_TWO_RANKS)
def _(told, _):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("context",))
    q, k, v = tensors()
    spread = [dist.tensor.distribute_tensor(x, mesh, [dist.tensor.Shard(1)]) for x in (q, k, v)]
    with told():
        attention(*spread, PATTERN)
    out = attention(*(x.to_local() for x in spread), PATTERN, mesh=mesh)
    same(whole(out, mesh), oracle(q, k, v))


# ---- patterns


@remedy("give the pattern alone")
def _(told):
    q, k, v = tensors()
    with told():
        Sum([PATTERN])
    same(attention(q, k, v, PATTERN), oracle(q, k, v))


@remedy("give at least one branch, such as segment_lengths=[2048]")
def _(told):
    q, k, v = tensors()
    with told():
        dilated(q, k, v, [], [])
    same(dilated(q, k, v, segment_lengths=[2048], dilation_rates=[1]), _dense(q, k, v))


@remedy('Leave offsets="head", or give the table without head_groups')
def _(told):
    q, k, v = tensors()
    table = Dilated((8, 16), (1, 2), head_groups=True).offset_table(4)
    with told():
        Dilated((8, 16), (1, 2), offsets=table, head_groups=True)
    left = attention(q, k, v, Dilated((8, 16), (1, 2), offsets="head", head_groups=True))
    given = attention(q, k, v, Dilated((8, 16), (1, 2), offsets=table))
    same(given, oracle(q, k, v, Dilated((8, 16), (1, 2), offsets=table)))
    assert torch.equal(left, given)


@remedy("give offsets as a table over all heads: Dilated(...).offset_table(total)")
def _(told):
    q, k, v = tensors(heads=8)
    for options in ({"offsets": "head_block"}, {"head_groups": True}):
        pattern = Dilated((8, 16), (1, 2), **options)
        with told():
            attention(*(x[:, :, 4:] for x in (q, k, v)), pattern, head_offset=4)
        table = Dilated((8, 16), (1, 2), pattern.offset_table(8))
        half = attention(*(x[:, :, 4:] for x in (q, k, v)), table, head_offset=4)
        same(half, oracle(q, k, v, pattern)[:, :, 4:])


@remedy("; of a larger module give head_offset")
def _(told):
    q, k, v = tensors(heads=8)
    table = Dilated((8, 16), (1, 2), [[0] * 8, [0, 0, 0, 0, 1, 1, 1, 1]])
    with told():
        attention(*(x[:, :, 4:] for x in (q, k, v)), table)
    half = attention(*(x[:, :, 4:] for x in (q, k, v)), table, head_offset=4)
    same(half, oracle(q, k, v, table)[:, :, 4:])


@remedy("Lower the dilation rate or lengthen the segment, or give an offset from 0 to {}")
def _(told):
    q, k, v = tensors()
    table = [[0] * 4, [2, 3, 4, 5]]
    with told() as caught:
        attention(q, k, v, Dilated((8, 2), (1, 6), table))
    most = int(of(caught, r"from 0 to (\d+)"))
    given = Dilated((8, 2), (1, 6), [[0] * 4, [2, 3, most, 5]])
    for pattern in (Dilated((8, 2), (1, 2)), Dilated((8, 12), (1, 6), table), given):
        same(attention(q, k, v, pattern), oracle(q, k, v, pattern))
    with told():  # where no head takes part, the rate and the segment change nothing
        attention(q, k, v, Dilated((8, 2), (1, 6), [[0] * 4, [-1] * 4]))


@remedy("attends the padding of whole segments, of which a layout shows parts; use {}, which has the same offsets")
def _(told):
    q, k, v = tensors()
    compat = Dilated((8, 16), (1, 2), compat="torchscale")
    with told() as caught:
        compat * (lambda length: BlockLayout.local(length, 4, 4))
    exact = eval(of(caught, "use (Dilated.*), which"))
    assert exact.compat is None
    assert exact.offset_table(4) == compat.offset_table(4) != PATTERN.offset_table(4)
    everything = exact * (lambda length: BlockLayout.local(length, length, 4))
    same(attention(q, k, v, everything), oracle(q, k, v, exact))


@remedy("lies on padding that the matrix has no column for; use {}, whose weights are those without padding")
def _(told):
    q, k, v = tensors(15)
    with told() as caught:
        attention_weights(q, k, Dilated((8, 16), (1, 2), compat="torchscale"))
    exact = eval(of(caught, "use (Dilated.*), whose"))
    weights = attention_weights(q, k, exact).to_dense()
    expected = oracle(q, k, v, exact)
    same(torch.einsum("bhij,bjhd->bihd", weights, v), expected)


@remedy("give a callable, length -> BlockLayout, or segments that are all of one length")
def _(told):
    q, k, v = tensors()
    layout = BlockLayout.local(8, 8, 4)
    with told():
        attention(q, k, v, Dilated((8, 12), (1, 1)) * layout)
    called = attention(q, k, v, Dilated((8, 12), (1, 1)) * (lambda length: BlockLayout.local(length, length, 4)))
    same(called, oracle(q, k, v, Dilated((8, 12), (1, 1))))
    same(attention(q, k, v, Dilated((8, 16), (1, 2)) * layout), oracle(q, k, v))


@remedy("{} in every branch covers every token")
def _(told):
    with told(UserWarning):
        Dilated((8, 16), (1, 2), head_groups=True).coverage(16, 4)
    assert Dilated((8, 16), (1, 1), head_groups=True).coverage(16, 4).min() >= 1


@remedy("A branch of dilation rate 1 covers every token")
def _(told):
    q = torch.randn(1, 16, 4, 8)
    with told(UserWarning):
        Dilated((16,), (8,)).coverage(16, 4)
    with pytest.warns(UserWarning, match=r"8 of 16 tokens take part in no branch .*rate 1 covers every token"):
        attention(q, q, q, Dilated((16,), (8,)))
    with pytest.warns(UserWarning, match=r"A term with a window, or with a branch of dilation rate 1, covers"):
        attention(q, q, q, Dilated((16,), (8,)) + Dilated((8,), (8,)))
    for pattern in (
        Dilated((4, 16), (1, 8)),
        Window(1) + Dilated((16,), (8,)),
        Dilated((16,), (8,)) + Dilated((8,), (1,)),
    ):
        assert (attention(q, q, q, pattern) != 0).all()
    assert Dilated((4, 16), (1, 8)).coverage(16, 4).min() >= 1
    with pytest.warns(UserWarning, match=r"covers every token, if the layout has no empty rows"):
        (Dilated((16,), (8,)) * (lambda n: BlockLayout.local(n, 1, 1))).coverage(16, 4)
    assert (Dilated((4, 16), (1, 8)) * (lambda n: BlockLayout.local(n, 1, 1))).coverage(16, 4).min() >= 1


@remedy("is too small for {} tokens and {} heads: give at least {}, which is the cost")
def _(told):
    for budget, kind in ((1, int), (1e-9, float)):
        for is_causal in (False, True):
            with told() as caught:
                suggest_pattern(1000, 8, budget=budget, is_causal=is_causal)
            found = suggest_pattern(
                1000, 8, budget=kind(of(caught, r"give at least budget=([\d.e-]+\d)")), is_causal=is_causal
            )
            least = of(caught, r"segments (\(.*?\)) at rates"), of(caught, r"at rates (\(.*?\))")
            assert (str(found.segment_lengths), str(found.dilation_rates)) == least


@remedy("more heads, or largest_rate= above their number, cost less")
def _(told):
    with told():
        suggest_pattern(1000, 8, budget=10)
    for heads, options in ((64, {}), (8, {"largest_rate": 64})):
        pattern = suggest_pattern(1000, heads, budget=40, **options)
        assert pattern.flops(1000, heads, 1) <= 40 * 4 * heads * 1000


@remedy("leave tokens out of branches: see `unserved`.")
def _(told):
    pattern = suggest_pattern(1000, 8, budget=40, largest_rate=64)
    told.printed(str(pattern))
    assert max(pattern.unserved(8)) > 0


# ---- block layouts


@remedy("Use leading tokens, or build without is_causal and take .causal()")
def _(told):
    with told():
        BlockLayout.global_(16, [5], 4, is_causal=True)
    q, k, v = tensors()
    leading = BlockLayout.global_(16, 2, 4, is_causal=True)
    same(attention(q, k, v, leading, is_causal=True), oracle(q, k, v, leading, is_causal=True))
    built = BlockLayout.global_(16, [5], 4)
    same(attention(q, k, v, built.causal()), oracle(q, k, v, built, is_causal=True))


@remedy("of a mask give mask.nonzero()")
def _(told):
    mask = torch.zeros(16, dtype=torch.bool)
    mask[[1, 9]] = True
    with told():
        BlockLayout.global_(16, mask, 4)
    assert BlockLayout.global_(16, mask.nonzero(), 4) == BlockLayout.global_(16, [1, 9], 4)


@remedy("give either {} or density, got {}")
def _(told):
    with told():
        BlockLayout.local(64, block_size=16)
    assert BlockLayout.local(64, window=1, block_size=16) == BlockLayout.local(64, density=0.25, block_size=16)


@remedy("which lies wholly above the diagonal; leave is_causal out and take .causal()")
def _(told):
    mask = torch.rand(4, 4) > 0.5
    mask |= torch.eye(4, dtype=torch.bool)
    mask[0, 3] = True
    with told():
        BlockLayout.from_mask(mask, block_size=4, is_causal=True)
    q, k, v = tensors()
    layout = BlockLayout.from_mask(mask, block_size=4)
    same(attention(q, k, v, layout.causal()), oracle(q, k, v, layout, is_causal=True))


@remedy("give torch.as_tensor(mask)")
def _(told):
    mask = np.eye(4, dtype=bool)
    with told():
        BlockLayout.from_mask(mask, 64, 16)
    assert torch.equal(BlockLayout.from_mask(torch.as_tensor(mask), 64, 16).dense_blocks()[0, 0], torch.eye(4).bool())


@remedy("use mask > threshold")
def _(told):
    mask = torch.rand(4, 4)
    with told():
        BlockLayout.from_mask(mask, block_size=4)
    layout = BlockLayout.from_mask(mask > 0.3, block_size=4)
    assert torch.equal(layout.to_torch_sparse().to_dense()[::4, ::4].bool(), mask > 0.3)


@remedy("is not square in tokens; give seq_len")
def _(told):
    mask = torch.ones(3, 5, dtype=torch.bool)
    with told():
        BlockLayout.from_mask(mask, block_size=(8, 4))
    q, k, v = tensors(19)
    same(attention(q, k, v, BlockLayout.from_mask(mask, seq_len=19, block_size=(8, 4))), _dense(q, k, v))


@remedy("in every batch element and head, got {}; convert them apart")
def _(told):
    mask = torch.zeros(2, 4, 4, dtype=torch.bool)
    mask[0, 0] = mask[1] = True
    layout = BlockLayout.from_mask(mask, block_size=4)
    with told():
        layout.to_torch_sparse()
    for head in range(2):
        apart = layout.select(heads=[head]).to_torch_sparse().to_dense()
        assert torch.equal(apart[::4, ::4].bool(), mask[head])


@remedy("use t.to_sparse_bsr(block_size)")
def _(told):
    t = torch.eye(4).repeat_interleave(4, 0).repeat_interleave(4, 1)
    with told():
        BlockLayout.from_torch_sparse(t)
    assert BlockLayout.from_torch_sparse(t.to_sparse_bsr((4, 4))) == BlockLayout.local(16, 1, 4)


@remedy("t is not square, got {}; give seq_len")
def _(told):
    t = torch.ones(16, 12).to_sparse_bsr((8, 4))
    with told():
        BlockLayout.from_torch_sparse(t)
    q, k, v = tensors(12)
    same(attention(q, k, v, BlockLayout.from_torch_sparse(t, seq_len=12)), _dense(q, k, v))


@remedy("Unite with a layout that covers every row, such as {}")
def _(told):
    for causal in (False, True):
        layout = BlockLayout.from_mask(torch.zeros(4, 8, dtype=torch.bool), block_size=(16, 8), is_causal=causal)
        with told(UserWarning) as caught:
            layout.coverage(64, 2)
        united = layout | eval(of(caught, r"such as (BlockLayout\.local\(.*\))"))
        assert united.coverage(64, 2).min() >= 1


@remedy("tokens, got seq_len={}; build one for that length")
def _(told):
    q, k, v = tensors()
    with told():
        attention(q, k, v, BlockLayout.local(8, 4, 4))
    same(attention(q, k, v, BlockLayout.local(16, 16, 4)), _dense(q, k, v))


@remedy("layout has lists for {} heads, got {}; give 1 or {}")
def _(told):
    q, k, v = tensors()
    with told():
        block_sparse_attention(q, k, v, BlockLayout.from_mask(torch.ones(3, 4, 4, dtype=torch.bool), block_size=4))
    for heads in (1, 4):
        layout = BlockLayout.from_mask(torch.ones(heads, 4, 4, dtype=torch.bool), block_size=4)
        same(block_sparse_attention(q, k, v, layout), _dense(q, k, v))


@remedy("layout has lists for a batch of {}, got {}; give 1 or {}")
def _(told):
    q, k, v = tensors(batch=2)
    with told():
        block_sparse_attention(q, k, v, BlockLayout.from_mask(torch.ones(3, 1, 4, 4, dtype=torch.bool), block_size=4))
    for batch in (1, 2):
        layout = BlockLayout.from_mask(torch.ones(batch, 1, 4, 4, dtype=torch.bool), block_size=4)
        same(block_sparse_attention(q, k, v, layout), _dense(q, k, v))


@remedy("tokens, got a sample of {}; build a longer one")
def _(told):
    q, k, v = tensors()
    packed = {"cu_seqlens": torch.tensor([0, 12, 16])}
    with told():
        attention(q, k, v, BlockLayout.local(8, 4, 4), **packed)
    layout = BlockLayout.local(12, 12, 4)
    same(attention(q, k, v, layout, **packed), oracle(q, k, v, Dilated((16,), (1,)), **packed))


@remedy("but q or k reaches to position {}; build a longer one")
def _(told):
    q, k, v = tensors()
    with told():
        attention(q[:, 8:], k, v, BlockLayout.local(12, 4, 4), is_causal=True, q_start=8)
    layout = BlockLayout.local(16, 4, 4)
    found = attention(q[:, 8:], k, v, layout, is_causal=True, q_start=8)
    same(found, oracle(q, k, v, layout, is_causal=True)[:, 8:])


@remedy("layouts is empty; give one layout per sample")
def _(told):
    with told():
        BlockLayout.stack([])
    layout, tensors_ = BlockLayout.local(16, 4, 4), tensors(batch=2)
    same(attention(*tensors_, BlockLayout.stack([layout] * 2)), oracle(*tensors_, layout))


@remedy("Every rank must pass the same selector with the same options", ON_TWO_RANKS)
def _(told, mesh):
    q, k, v = tensors()
    mine, choose = [shard(x, mesh) for x in (q, k, v)], partial(routing.topk_blocks, density=0.5, block_size=4)
    with told():
        parallel.choose_blocks(partial(choose, block_size=4 + 4 * dist.get_rank(mesh)), *mine[:2], mesh)
    layout = parallel.choose_blocks(choose, *mine[:2], mesh)
    same(whole(attention(*mine, layout, mesh=mesh), mesh), oracle(q, k, v, choose(q, k)))


@remedy("make one call per sample, each with its layout", ON_TWO_RANKS)
def _(told, mesh):
    q, k, v = tensors()
    samples = [[x[:, start:stop] for x in (q, k, v)] for start, stop in ((0, 10), (10, 16))]
    layouts = [BlockLayout.random(x[0].shape[1], 0.5, 1, 4) for x in samples]
    with told():
        mine = [shard(x, mesh) for x in (q, k, v)]
        attention(*mine, BlockLayout.stack(layouts), cu_seqlens=[0, 10, 16], mesh=mesh)
    for sample, layout in zip(samples, layouts, strict=True):
        out = attention(*(shard(x, mesh) for x in sample), layout, mesh=mesh)
        same(whole(out, mesh), oracle(*sample, layout))


GRID = Neighborhood((4, 4), (3, 3))


@remedy("Give a window of at most {} there, or a lower rate")
def _(told):
    with told() as caught:
        Neighborhood((4, 4), (3, 3), rate=(1, 2))
    narrower = int(of(caught, r"at most (\d+) there"))
    assert Neighborhood((4, 4), (3, narrower), rate=(1, 2)).window == (3, 2)
    assert Neighborhood((4, 4), (3, 3), rate=1) == GRID


@remedy("some queries would not see themselves; give at most the window")
def _(told):
    with told():
        Neighborhood((4, 4), (3, 3), stride=4)
    assert (Neighborhood((4, 4), (3, 3), stride=3).coverage(16, 1) == 9).all()


@remedy("a product is of dilated segments and a layout; give a sum, Neighborhood(...) + layout")
def _(told):
    layout = BlockLayout.local(16, 2, 4)
    with told():
        GRID * layout
    q, k, v = tensors()
    same(attention(q, k, v, GRID + layout), oracle(q, k, v, GRID + layout))


@remedy("Give a Neighborhood of the shape of this sequence")
def _(told):
    q, k, v = tensors(20)
    with told():
        attention(q, k, v, GRID)
    pattern = Neighborhood((4, 5), (3, 3))
    same(attention(q, k, v, pattern), oracle(q, k, v, pattern))


@remedy("leave is_causal out and give Neighborhood(..., is_causal=True)")
def _(told):
    q, k, v = tensors()
    with told():
        attention(q, k, v, GRID, is_causal=True)
    pattern = Neighborhood((16,), (3,), is_causal=True)
    same(attention(q, k, v, pattern), oracle(q, k, v, Window(2), is_causal=True))


@remedy("give the whole grid, without positions")
def _(told):
    q, k, v = tensors()
    with told():
        attention(q[:, 8:], k, v, GRID, q_start=8)
    same(attention(q, k, v, GRID)[:, 8:], oracle(q, k, v, GRID)[:, 8:])


@remedy("every sample must be a whole grid: leave lengths out")
def _(told):
    q, k, v = tensors()
    with told():
        attention(q, k, v, GRID, lengths=[16])
    same(attention(q, k, v, GRID), oracle(q, k, v, GRID))


@remedy("every sample must be a whole grid: give grids as a batch")
def _(told):
    q, k, v = tensors(32)
    with told():
        attention(q, k, v, GRID, cu_seqlens=[0, 16, 32])
    grids = [x.view(2, 16, 4, 8) for x in (q, k, v)]
    same(attention(*grids, GRID), oracle(*grids, GRID))


@remedy("leaves the number of axes open; give one number per axis")
def _(told):
    with told():
        NeighborhoodAttention(16, 2, 3, rel_pos_bias=True)
    x = torch.randn(1, 4, 4, 16)
    layer = NeighborhoodAttention(16, 2, (3, 3), rel_pos_bias=True)
    by_axes = NeighborhoodAttention2D(16, 2, 3, rel_pos_bias=True)
    by_axes.load_state_dict(layer.state_dict())
    same(by_axes(x), layer(x))


@remedy("keep each sample on one rank", ON_TWO_RANKS)
def _(told, mesh):
    q, k, v = tensors()
    with told():
        attention(*(shard(x, mesh) for x in (q, k, v)), GRID, mesh=mesh)
    same(attention(q, k, v, GRID), oracle(q, k, v, GRID))


@remedy("Give layout.prefix({}) if that is meant, or BlockLayout.stack of each sample's layout")
def _(told):
    q, k, v = tensors()
    packed, layout = {"cu_seqlens": torch.tensor([0, 12, 16])}, BlockLayout.random(16, 0.5, 1, 4)
    with told() as caught:
        attention(q, k, v, layout, **packed)
    prefix = eval(of(caught, r"Give (layout\.prefix\(\d+\))"), {"layout": layout})
    samples = [[x[:, start:stop] for x in (q, k, v)] for start, stop in ((0, 12), (12, 16))]
    apart = [oracle(*x, layout.prefix(x[0].shape[1])) for x in samples]
    same(attention(q, k, v, prefix, **packed), torch.cat(apart, 1))
    own = [BlockLayout.random(12, 0.5, 1, 4), BlockLayout.local(4, 4, 4)]
    apart = [oracle(*x, layout) for x, layout in zip(samples, own, strict=True)]
    same(attention(q, k, v, BlockLayout.stack(own), **packed), torch.cat(apart, 1))


@remedy("; give BlockLayout.from_block_mask of it")
def _(told):
    q, k, v = tensors(64)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    with told():
        attention(q, k, v, mask)
    same(attention(q, k, v, BlockLayout.from_block_mask(mask)), oracle(q, k, v, Dilated((64,), (1,)), is_causal=True))


@remedy("; give BlockLayout.from_mask(mask, seq_len) of booleans per pair or per block, or "
        "BlockLayout.from_torch_sparse of a BSR tensor")  # fmt: skip
def _(told):
    q, k, v = tensors()
    local = BlockLayout.local(16, 5, 4)
    blocks = local.to_torch_sparse().to_dense()[::4, ::4].bool()
    for given in (blocks, local.to_torch_sparse()):
        with told():
            attention(q, k, v, given)
    for layout in (
        BlockLayout.from_mask(blocks, block_size=4),
        BlockLayout.from_torch_sparse(local.to_torch_sparse()),
    ):
        same(attention(q, k, v, layout), oracle(q, k, v, local))


@remedy(". If q is (batch, heads, seq, head_dim), give q.transpose(1, 2)")
def _(told):
    q, k, v = tensors()
    with told():
        attention(*(x.transpose(1, 2) for x in (q, k, v)), BlockLayout.local(16, 5, 4))
    same(attention(q, k, v, BlockLayout.local(16, 16, 4)), _dense(q, k, v))


@remedy("a table was written to after the layout was made; make a new BlockLayout of it")
def _(told):
    q, k, v = tensors()
    indptr, indices = torch.arange(5)[None, None], torch.tensor([0, 1, 2, 3])
    layout = BlockLayout(indptr, indices, seq_len=16, q_block=4, k_block=4)
    layout.indices.copy_(torch.tensor([3, 2, 1, 0]))
    with told():
        attention(q, k, v, layout)
    fresh = BlockLayout(layout.indptr, layout.indices, seq_len=16, q_block=4, k_block=4)
    turned = torch.cat(
        [_dense(q[:, i : i + 4], k[:, 12 - i : 16 - i], v[:, 12 - i : 16 - i]) for i in (0, 4, 8, 12)], 1
    )
    same(attention(q, k, v, fresh), turned)


@remedy("no keys to choose among; append those of the tokens so far")
def _(told):
    q, k, _ = tensors()
    bounds = PageBounds(4)
    with told():
        bounds.best(q[:, -1:], 2)
    bounds.append(k)
    assert (bounds.best(q[:, -1:], 2) == 3).any(-1).all()  # the newest page


# ---- modules


@remedy("give both, or pattern=")
def _(told):
    tensors_ = tensors()
    with told():
        DilatedAttention([16])
    expected = oracle(*tensors_, Dilated((16,), (2,)))
    same(DilatedAttention([16], [2])(*tensors_), expected)
    same(DilatedAttention(pattern=Dilated((16,), (2,)))(*tensors_), expected)


@remedy("which the pattern holds itself; leave them out")
def _(told):
    tensors_ = tensors()
    with told():
        DilatedAttention(pattern=Dilated((16,), (2,)), offsets="head_block")
    pattern = Dilated((16,), (2,), offsets="head_block")
    same(DilatedAttention(pattern=pattern)(*tensors_), oracle(*tensors_, pattern))


@remedy("Give both, or none for a layout without dilation")
def _(told):
    layout, tensors_ = BlockLayout.local(16, 4, 4), tensors()
    with told():
        BlockSparseDilatedAttention(layout, [16])
    same(BlockSparseDilatedAttention(layout)(*tensors_), oracle(*tensors_, layout))
    both = BlockSparseDilatedAttention(layout, [16], [1])
    same(both(*tensors_), oracle(*tensors_, layout))


@remedy("are of a dilated pattern; give segment_lengths and dilation_rates, or leave them out")
def _(told):
    layout, tensors_ = BlockLayout.local(8, 4, 4), tensors()
    with told():
        BlockSparseDilatedAttention(layout, offsets="head_block")
    given = BlockSparseDilatedAttention(layout, [16], [2], offsets="head_block")
    same(given(*tensors_), oracle(*tensors_, Dilated((16,), (2,), "head_block") * layout))
    out = BlockSparseDilatedAttention(BlockLayout.local(16, 4, 4))
    same(out(*tensors_), oracle(*tensors_, BlockLayout.local(16, 4, 4)))


BRANCHES = {"segment_lengths": [64], "dilation_rates": [1]}


def theirs_and_ours(**options: Any) -> tuple[nn.MultiheadAttention, MultiheadDilatedAttention]:
    theirs = nn.MultiheadAttention(16, 2, batch_first=True)
    ours = MultiheadDilatedAttention(16, 2, **BRANCHES, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@remedy("the added key has no position, so no branch shows it; leave it False")
def _(told):
    for name in ("add_bias_kv", "add_zero_attn"):
        with told():
            MultiheadDilatedAttention(16, 2, **BRANCHES, **{name: True})
    theirs, ours = theirs_and_ours(add_bias_kv=False, add_zero_attn=False)
    x = torch.randn(2, 12, 16)
    same(ours(x, x, x)[0], theirs(x, x, x)[0])


@remedy("need_weights=True: over a mesh no rank holds a row of weights; pass False")
def _(told, one_rank):
    theirs, ours = theirs_and_ours()
    ours.attention.mesh = one_rank
    x = torch.randn(2, 12, 16)
    with told():
        ours(x, x, x, need_weights=True)
    same(ours(x, x, x, need_weights=False)[0], theirs(x, x, x)[0])


@remedy("need_weights=True with lengths, cu_seqlens or bias is not supported; pass False")
def _(told):
    theirs, ours = theirs_and_ours()
    x, lengths = torch.randn(2, 12, 16), torch.tensor([12, 5])
    with told():
        ours(x, x, x, need_weights=True, lengths=lengths)
    with told():
        ours(x, x, x, need_weights=True, bias=Alibi(torch.rand(2)))
    found, _ = ours(x, x, x, need_weights=False, lengths=lengths)
    for sample, length in zip(range(2), lengths, strict=True):
        own = x[sample : sample + 1, :length]
        same(found[sample : sample + 1, :length], theirs(own, own, own)[0])


@remedy("a floating mask may hold 0 and -inf only; give other numbers as bias=")
def _(told):
    theirs, ours = theirs_and_ours()
    x = torch.randn(2, 12, 16)
    mask = torch.randn(12, 12)
    with told():
        ours(x, x, x, attn_mask=mask)
    same(ours(x, x, x, bias=mask[None, None])[0], theirs(x, x, x, attn_mask=mask)[0])


@remedy("pad ragged samples and pass key_padding_mask (in nn.TransformerEncoder: enable_nested_tensor=False)")
def _(told):
    theirs, ours = theirs_and_ours()
    samples = [torch.randn(5, 16), torch.randn(12, 16)]
    nested = torch.nested.nested_tensor(samples, layout=torch.jagged)
    with told():
        ours(nested, nested, nested)
    x = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    padding = torch.arange(12) >= torch.tensor([[5], [12]])
    out = ours(x, x, x, key_padding_mask=padding)[0]
    for row, sample in zip(out, samples, strict=True):
        same(row[: len(sample)], theirs(sample, sample, sample)[0])
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    expected = encoder(x, src_key_padding_mask=padding)
    convert_attention(encoder, **BRANCHES)
    same(encoder(x, src_key_padding_mask=padding)[~padding], expected[~padding])


@remedy("samples of one token each; if it is one sample, construct with batch_first={}")
def _(told):
    x = torch.randn(256, 1, 16)
    theirs = nn.MultiheadAttention(16, 2)
    ours = MultiheadDilatedAttention(16, 2, segment_lengths=[256], dilation_rates=[1])
    with told(UserWarning) as caught:
        ours(x, x, x)
    turned = MultiheadDilatedAttention(
        16, 2, segment_lengths=[256], dilation_rates=[1], batch_first=eval(of(caught, "batch_first=(True|False)"))
    )
    turned.load_state_dict(theirs.state_dict())
    same(turned(x, x, x)[0], theirs(x, x, x)[0])


@remedy("pass is_causal=True for causality and key_padding_mask for padding")
def _(told):
    theirs, ours = theirs_and_ours()
    x, padding = torch.randn(2, 12, 16), torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 7:] = True
    causal = torch.ones(12, 12, dtype=torch.bool).triu(1)
    mask = (causal | padding[:, None]).repeat_interleave(2, 0)
    with told():
        ours(x, x, x, attn_mask=mask)
    out = ours(x, x, x, is_causal=True, key_padding_mask=padding)[0]
    same(out[~padding], theirs(x, x, x, attn_mask=mask)[0][~padding])


@remedy("make a MultiheadDilatedAttention of the same arguments, with batch_first={}, and load its state_dict")
def _(told):
    x = torch.randn(12, 3, 16)
    arguments: dict[str, Any] = {"embed_dim": 16, "num_heads": 2, "bias": False}
    theirs = nn.MultiheadAttention(**arguments)
    with told() as caught:
        convert_attention(theirs, **BRANCHES)
    ours = MultiheadDilatedAttention(**arguments, batch_first=eval(of(caught, "batch_first=(True|False)")), **BRANCHES)
    ours.load_state_dict(theirs.state_dict())
    same(ours(x, x, x)[0], theirs(x, x, x)[0])


class Louder(nn.MultiheadAttention):
    def forward(self, *arguments: Any, **options: Any) -> Any:
        out, weights = super().forward(*arguments, **options)
        return 2 * out, weights


@remedy("may compute more than nn.MultiheadAttention; leave it out")
def _(told):
    model = nn.ModuleList([nn.MultiheadAttention(16, 2), Louder(16, 2)])
    with told():
        convert_attention(model, **BRANCHES)
    assert convert_attention(model, **BRANCHES, choose=lambda name, module: type(module) is not Louder) == ["0"]
    assert type(model[1]) is Louder


@remedy("it has hooks, which would be lost; remove them first")
def _(told):
    model = nn.ModuleList([nn.MultiheadAttention(16, 2)])
    handle = model[0].register_forward_hook(lambda *arguments: None)
    x = torch.randn(12, 3, 16)
    expected = model[0](x, x, x)[0]
    with told():
        convert_attention(model, **BRANCHES)
    handle.remove()
    convert_attention(model, **BRANCHES)
    same(model[0](x, x, x)[0], expected)


SELECTION = {
    "compress_block": 4, "compress_stride": 2, "block_size": 4, "num_selected": 3, "window": 4, "query_block": 4
}  # fmt: skip


@remedy("samples, got x with {}; begin with an empty one")
def _(told):
    layer = NativeSparseAttention(16, 2, **SELECTION)
    cache, x = SelectionCache(), torch.randn(2, 8, 16)
    layer(x, cache=cache)
    with told():
        layer(x[:1], cache=cache)
    same(layer(x[:1], cache=SelectionCache()), layer(x[:1]))


@remedy("holds the tokens of another layer; each layer needs a SelectionCache of its own")
def _(told):
    layers = [NativeSparseAttention(16, 2, **SELECTION) for _ in range(2)]
    cache, x = SelectionCache(), torch.randn(2, 8, 16)
    layers[0](x, cache=cache)
    with told():
        layers[1](x, cache=cache)
    same(layers[1](x, cache=SelectionCache()), layers[1](x))


@remedy("got length={}: give SelectionCache a larger croppable, or compute the prompt anew")
def _(told):
    layer, x = NativeSparseAttention(16, 2, **SELECTION), torch.randn(1, 8, 16)
    caches = [SelectionCache(croppable) for croppable in (2, 3)]
    for cache in caches:
        layer(x[:, :4], cache=cache)
        layer(x[:, 4:], cache=cache)
    with told():
        caches[0].crop(5)
    caches[1].crop(5)
    same(layer(x[:, 5:], cache=caches[1]), layer(x)[:, 5:])
    cache = SelectionCache()
    layer(x[:, :5], cache=cache)
    same(layer(x[:, 5:], cache=cache), layer(x)[:, 5:])


@remedy('use a larger xpos_scale_base, a dtype of wider range, or positions="rope"')
def _(told):
    def model(dtype: torch.dtype = torch.float32, **options: Any) -> LongNetEncoder:
        config = {"vocab_size": None, "embed_dim": 16, "num_layers": 1, "num_heads": 2, "positions": "xpos"}
        return LongNetEncoder(LongNetConfig(**config | {"xpos_scale_base": 1.0, "pattern": PATTERN} | options)).to(
            dtype
        )

    x = torch.randn(1, 200, 16)
    with told():
        model()(x)
    for served in (model(xpos_scale_base=512.0), model(torch.float64), model(positions="rope")):
        assert served(x.to(served.norm.weight.dtype)).isfinite().all()


# ---- over a mesh


@remedy("sees one device; with a mesh use backend='auto'", ON_TWO_RANKS)
def _(told, mesh):
    q, k, v = tensors()
    mine = [shard(x, mesh) for x in (q, k, v)]
    with told():
        attention(*mine, PATTERN, mesh=mesh, backend="reference")
    same(whole(attention(*mine, PATTERN, mesh=mesh, backend="auto"), mesh), oracle(q, k, v))


@remedy("over a mesh it takes no {}; native does", ON_TWO_RANKS)
def _(told, mesh):
    if cpu._load()[2]:
        told.heard += 1
        return
    q, k, v = tensors()
    mine, hidden = [shard(x, mesh) for x in (q, k, v)], torch.arange(16)[None] % 5 == 0
    with told():
        attention(*mine, PATTERN, mesh=mesh, key_padding_mask=shard(hidden, mesh), backend="cpu")
    out = attention(*mine, PATTERN, mesh=mesh, key_padding_mask=shard(hidden, mesh), backend="native")
    same(whole(out, mesh), oracle(q, k, v, key_padding_mask=hidden))


@remedy("pack the batch: cu_seqlens", ON_TWO_RANKS)
def _(told, mesh):
    q, k, v = tensors(batch=2)
    with told():
        attention(*(shard(x, mesh) for x in (q, k, v)), PATTERN, mesh=mesh, dropout_p=0.5, lengths=[16, 11])
    packed = [torch.cat((x[0], x[1, :11]))[None] for x in (q, k, v)]
    results = []
    for options, given in (({}, packed), ({"mesh": mesh, "seq_len": 27}, [shard(x, mesh) for x in packed])):
        torch.manual_seed(1)
        results.append(attention(*given, PATTERN, dropout_p=0.5, cu_seqlens=torch.tensor([0, 16, 27]), **options))
    same(parallel.unshard_sequence(results[1], mesh, seq_len=27), results[0])


@remedy(
    "holds no attention of this library; {}Use nn.MultiheadDilatedAttention or nn.DilatedAttention in it", ON_TWO_RANKS
)
def _(told, mesh):
    with told():
        parallel.set_context_parallel(nn.MultiheadAttention(16, 2), mesh)
    theirs, ours = theirs_and_ours()
    for x in theirs.state_dict().values():
        dist.broadcast(x, 0, group=mesh)
    parallel.set_context_parallel(ours, mesh)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 12, 16)
    mine = shard(x, mesh)
    same(whole(ours(mine, mine, mine)[0], mesh), theirs(x, x, x)[0])
    module, (q, k, v) = DilatedAttention([8, 16], [1, 2]), tensors()
    parallel.set_context_parallel(module, mesh)
    same(whole(module(*(shard(x, mesh) for x in (q, k, v))), mesh), oracle(q, k, v))


@remedy("is [{}, {}), {} tokens: see sequence_range", ON_TWO_RANKS)
def _(told, mesh):
    q, k, v = tensors(15)
    wrong = [x[:, :7] for x in (q, k, v)]
    with told():
        attention(*wrong, PATTERN, mesh=mesh, seq_len=15)
    start, stop = parallel.sequence_range(15, mesh)
    out = attention(*(x[:, start:stop] for x in (q, k, v)), PATTERN, mesh=mesh, seq_len=15)
    same(parallel.unshard_sequence(out, mesh, seq_len=15), oracle(q, k, v))


@remedy("and seq_len if shards differ in length", ON_TWO_RANKS)
def _(told, mesh):
    x = torch.randn(2, 11, 3)
    mine = shard(x, mesh)
    with told():
        whole(mine, mesh)
    assert torch.equal(parallel.unshard_sequence(mine, mesh, seq_len=11), x)


@remedy("does not serve this call: {}; use transport='auto'", ON_TWO_RANKS)
def _(told, mesh):
    q, k, v = tensors(15)
    start, stop = parallel.sequence_range(15, mesh)
    mine = [x[:, start:stop] for x in (q, k, v)]
    with told():
        attention(*mine, PATTERN, mesh=mesh, seq_len=15, transport="doubling")
    out = attention(*mine, PATTERN, mesh=mesh, seq_len=15, transport="auto")
    same(parallel.unshard_sequence(out, mesh, seq_len=15), oracle(q, k, v))


@remedy('Slice it: mesh["context"]', ON_TWO_RANKS)
def _(told, _):
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context"))
    q, k, v = tensors()
    with told():
        attention(q, k, v, PATTERN, mesh=mesh)
    mine = [shard(x, mesh["context"]) for x in (q, k, v)]
    same(whole(attention(*mine, PATTERN, mesh=mesh["context"]), mesh["context"]), oracle(q, k, v))


@remedy(
    "is_grads_batched=True, and with it jacobian(vectorize=True), is not supported for attention; use "
    "torch.func.jacrev or torch.func.vmap, or compute one gradient at a time"
)
def _(told):
    q, k, v = tensors()
    leaf = q.requires_grad_()
    out = attention(leaf, k, v, PATTERN)
    several = torch.randn(3, *out.shape, dtype=out.dtype)
    with told():
        torch.autograd.grad(out, leaf, several, is_grads_batched=True, retain_graph=True)
    _, gradient = torch.func.vjp(lambda q: attention(q, k, v, PATTERN), q.detach())
    (mapped,) = torch.func.vmap(gradient)(several)
    for x, dout in zip(mapped, several, strict=True):
        same(x, torch.autograd.grad(out, leaf, dout, retain_graph=True)[0])


class Sparse(nn.Module):
    """Hold a call whose layout is a function of the length."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> Tensor:
        return attention(q, k, v, PATTERN * (lambda n: BlockLayout.local(n, 8, 8)), lengths=lengths)


@remedy(
    "torch.export of a layout inside segments, or of a layout function, with lengths or cu_seqlens: no program holds "
    "the lists of all samples; export a call on whole sequences, without lengths and cu_seqlens"
)
def _(told):
    given = tensors()
    with told():
        torch.export.export(Sparse(), given, {"lengths": torch.tensor([9])})
    same(torch.export.export(Sparse(), given).module()(*given), Sparse()(*given))


@remedy(
    "torch.export of a layout function for any length: no program holds the lists of all lengths; export for one "
    "length, without dynamic_shapes for seq"
)
def _(told):
    given, length = tensors(), torch.export.Dim("length", min=2, max=4096)
    with told():
        torch.export.export(Sparse(), given, dynamic_shapes=[{1: length}] * 3)
    same(torch.export.export(Sparse(), given).module()(*given), Sparse()(*given))


def language_model(**options: Any) -> LongNetLM:
    config = {"vocab_size": 20, "embed_dim": 16, "num_layers": 1, "num_heads": 2, "pattern": PATTERN}
    return LongNetLM(LongNetConfig(**config | options)).eval()


@remedy("lengths with a mesh is not supported; call parallel.set_context_parallel(model, None) first", ON_TWO_RANKS)
def _(told, mesh):
    config = LongNetConfig(vocab_size=20, embed_dim=16, num_layers=1, num_heads=2, pattern=PATTERN)
    model, tokens = LongNetEncoder(config).eval(), torch.randint(20, (2, 16))
    expected = model(tokens, lengths=[16, 9])
    parallel.set_context_parallel(model, mesh)
    with told():
        model(shard(tokens, mesh), lengths=[16, 9])
    parallel.set_context_parallel(model, None)
    same(model(tokens, lengths=[16, 9]), expected)


@remedy("with config.selection; call parallel.set_context_parallel(model, None) first", ON_TWO_RANKS)
def _(told, mesh):
    model = language_model(pattern=None, selection=BlockMixture(block_size=4, query_block=2))
    tokens = torch.randint(20, (2, 9))
    expected = model.generate(tokens, 3, temperature=0)
    parallel.set_context_parallel(model, mesh)
    with told():
        model.generate(tokens, 3, temperature=0)
    parallel.set_context_parallel(model, None)
    assert torch.equal(model.generate(tokens, 3, temperature=0), expected)


@remedy("layers with indexers, selection=IndexedKeys(...); got {}: call loss")
def _(told):
    model, tokens = language_model(), torch.randint(20, (2, 9))
    with told():
        model.losses(tokens)
    assert model.loss(tokens).isfinite()
    indexed = language_model(pattern=None, selection=IndexedKeys(top_k=4))
    assert all(loss.isfinite() for loss in indexed.losses(tokens))


def slide_encoder() -> GigaPathSlideEncoder:
    inner = LongNetConfig(vocab_size=None, embed_dim=16, num_layers=1, num_heads=2, pattern=PATTERN, positions=None)
    return GigaPathSlideEncoder(GigaPathConfig(in_chans=8, slide_ngrids=8, tile_size=256, encoder=inner)).eval()


@remedy(
    "Call parallel.set_context_parallel(model, None); or parallel.set_context_parallel(model.encoder, mesh), and give "
    "model.encoder this rank's shard of what it reads",
    ON_TWO_RANKS,
)
def _(told, mesh):
    model, tiles, coords = slide_encoder(), torch.randn(1, 15, 8), 256 * torch.randint(8, (1, 15, 2))
    expected, (rows, _) = model(tiles, coords), model.embed(tiles, coords)
    states = model.encoder(rows)
    with told():
        parallel.set_context_parallel(model, mesh)
        model(tiles, coords)
    parallel.set_context_parallel(model, None)
    same(model(tiles, coords), expected)
    parallel.set_context_parallel(model.encoder, mesh)
    same(whole(model.encoder(shard(rows, mesh)), mesh), states)


@remedy("leave positions out, which count from the sequence's start", ON_TWO_RANKS)
def _(told, mesh):
    model, tokens = language_model(positions="xpos"), torch.randint(20, (2, 16))
    expected = model(tokens)
    parallel.set_context_parallel(model, mesh)
    with told():
        model(shard(tokens, mesh), positions=torch.arange(16)[slice(*parallel.sequence_range(16, mesh))])
    same(whole(model(shard(tokens, mesh)), mesh), expected)


# ---- models and checkpoints


@remedy("encoder is in training mode, where dropout changes the attention: call encoder.eval()")
def _(told):
    model, tiles, coords = slide_encoder().train(), torch.randn(1, 15, 8), 256 * torch.randint(8, (1, 15, 2))
    with told():
        tile_attention(model, tiles, coords)
    model.eval()
    assert tile_attention(model, tiles, coords).heads.isfinite().all()


@remedy("which hold every pixel; got {}: pass torch.as_tensor of them as they were read")
def _(told):
    model, tiles = slide_encoder(), torch.randn(1, 15, 8)
    read = 256 * np.arange(30).reshape(1, 15, 2) % 2048
    for coords in (read, torch.as_tensor(read).half()):
        with told():
            model(tiles, coords)
    same(model(tiles, torch.as_tensor(read)), model(tiles, torch.as_tensor(read).float()))


@remedy("must be a torch.Tensor; got {}: pass torch.as_tensor({})")
def _(told):
    model, tiles, coords = slide_encoder(), torch.randn(1, 15, 8), 256 * torch.randint(8, (1, 15, 2))
    with told():
        model(tiles.numpy(), coords)
    assert torch.equal(model(torch.as_tensor(tiles.numpy()), coords), model(tiles, coords))


@remedy("must have the model's dtype, {}; got {}: pass {}.to({}), or turn the model with model.to(dtype)")
def _(told):
    model, tiles, coords = slide_encoder(), torch.randn(1, 15, 8).double(), 256 * torch.randint(8, (1, 15, 2))
    with told():
        model(tiles, coords)
    out = model(tiles.to(torch.float32), coords)
    same(out, model.to(torch.float64)(tiles, coords))


@remedy("samples of one token each; if it is (seq, batch, ...), pass x.transpose(0, 1)")
def _(told):
    model, x = language_model(), torch.randint(20, (256, 1))
    with told(UserWarning):
        model(x)
    same(model(x.transpose(0, 1)), model(x.T.contiguous()))


@remedy("vocab_size=None: a language model writes tokens; give their number")
def _(told):
    with told():
        language_model(vocab_size=None)
    assert language_model(vocab_size=20)(torch.randint(20, (1, 9))).shape == (1, 9, 20)


@remedy("max_len=None: dense attention sees every earlier token; give the length to make room for")
def _(told):
    model, tokens = language_model(pattern=None), torch.randint(20, (1, 9))
    with told():
        model.prefill(tokens)
    logits, cache = model.prefill(tokens[:, :8], max_len=9)
    same(model.decode(tokens[:, 8], cache), model(tokens)[:, -1])
    same(logits, model(tokens)[:, 7])


@remedy("tokens do not fit a cache of max_len={}; make it with a larger one")
def _(told):
    model, tokens = language_model(), torch.randint(20, (1, 9))
    with told():
        model.decode(tokens[:, 8], model.prefill(tokens[:, :8], max_len=8)[1])
    same(model.decode(tokens[:, 8], model.prefill(tokens[:, :8], max_len=9)[1]), model(tokens)[:, -1])
    assert KeyValueCache(model.config, 1, max_len=9).nbytes > 0


@remedy("cache belongs to a model of another configuration; call this model's prefill")
def _(told):
    model, tokens = language_model(), torch.randint(20, (1, 9))
    other = language_model(pattern=Dilated((4, 8), (1, 2)))
    with told():
        model.decode(tokens[:, 8], other.prefill(tokens[:, :8])[1])
    same(model.decode(tokens[:, 8], model.prefill(tokens[:, :8])[1]), model(tokens)[:, -1])


@remedy("tokens: empty prompt; give at least one token per sample")
def _(told):
    model = language_model()
    with told():
        model.generate(torch.zeros(1, 0, dtype=torch.int64), 2)
    token = torch.tensor([[3]])
    assert model.generate(token, 1, temperature=0)[0, 1] == model(token)[0, -1].argmax()


@remedy("cannot hold every one of vocab_size={}: pass tokens.long()")
def _(told):
    model, tokens = language_model(vocab_size=300), torch.randint(200, (1, 5), dtype=torch.uint8)
    with told():
        model.generate(tokens, 2, temperature=0)
    longer = model.generate(tokens.long(), 1, temperature=0)
    assert longer[0, -1] == model(tokens)[0, -1].argmax()


def golden(**options: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    case = Golden("ts_longnet_encoder_aligned")
    return case.weights, case.options | options


@remedy("not plain tensors: {}; save the model's state_dict alone")
def _(told, tmp_path):
    weights, options = golden()
    torch.save({**weights, "step": 3}, tmp_path / "all")
    with told():
        load_torchscale(tmp_path / "all", **options)
    torch.save(weights, tmp_path / "alone")
    _loads(tmp_path / "alone", weights, options)


def _loads(path: Path, weights: dict[str, Tensor], options: dict[str, Any]) -> None:
    found, expected = (load_torchscale(x, **options).state_dict() for x in (path, weights))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@remedy("or a pickle of more than plain tensors, which is never run ({}); save the model's state_dict alone")
def _(told, tmp_path):
    weights, options = golden()
    torch.save({"model": weights, "path": tmp_path}, tmp_path / "all")
    with told():
        load_torchscale(tmp_path / "all", **options)
    torch.save({"model": weights}["model"], tmp_path / "alone")
    _loads(tmp_path / "alone", weights, options)


@remedy("save the model's state_dict alone, its tensors contiguous")
def _(told, tmp_path):
    weights, options = golden()
    name = next(name for name, x in weights.items() if x.dim() == 1)
    spread = {**weights, name: weights[name][:1].clone().expand_as(weights[name])}
    with told():
        load_torchscale(spread, **options)
    torch.save({name: x.contiguous() for name, x in spread.items()}, tmp_path / "alone")
    _loads(tmp_path / "alone", {name: x.contiguous() for name, x in spread.items()}, options)


@remedy("num_heads: the weights do not tell; give the number of attention heads")
def _(told):
    weights, options = golden()
    with told():
        load_torchscale(weights, **{**options, "num_heads": None})
    assert load_torchscale(weights, **options).config.num_heads == options["num_heads"]


@remedy("not of a released model; give segment_lengths")
def _(told):
    weights = longvit_weights()
    with told():
        load_longvit(weights, num_heads=4)
    model = load_longvit(weights, segment_lengths=[8, 16], dilation_rates=[1, 2], num_heads=4)
    assert model(torch.randn(1, 3, 8, 8)).isfinite().all()


@remedy("; if that was meant, delete {}")
def _(told, tmp_path):
    model = language_model()
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text() + "\n")
    with told() as caught:
        LongNetLM.from_pretrained(tmp_path)
    (tmp_path / of(caught, r"delete (\w+)")).unlink()
    tokens = torch.randint(20, (1, 9))
    assert torch.equal(LongNetLM.from_pretrained(tmp_path)(tokens), model(tokens))


@remedy("weights must share one floating dtype; got {}: save it after model.to(dtype)")
def _(told, tmp_path):
    model, tokens = language_model(), torch.randint(20, (1, 9))
    expected = model(tokens)
    model.norm.double()
    with told():
        model.save_pretrained(tmp_path)
    model.to(torch.float32).save_pretrained(tmp_path)
    same(LongNetLM.from_pretrained(tmp_path)(tokens), expected)


@remedy("leave positions out: each sample's count from 0")
def _(told):
    model, tokens, edges = language_model(), torch.randint(20, (1, 16)), torch.tensor([0, 10, 16])
    with told():
        model(tokens, cu_seqlens=edges, positions=torch.arange(16))
    out = model(tokens, cu_seqlens=edges)
    same(out, torch.cat([model(tokens[:, :10]), model(tokens[:, 10:])], 1))


@remedy("Pack the tokens that are not hidden, x[~key_padding_mask][None], and give cu_seqlens")
def _(told):
    q, k = (torch.randn(2, 40, heads, 8) for heads in (4, 2))
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask[0, :7] = True
    choose = partial(routing.topk_blocks, density=0.5, block_size=8)
    with told():
        choose(q, k, key_padding_mask=mask)
    found = choose(*(x[~mask][None] for x in (q, k)), cu_seqlens=torch.tensor([0, 33, 73]))
    assert found.select(batch=[0]).prefix(33) == choose(q[:1, 7:], k[:1, 7:])
    assert found.select(batch=[1]) == choose(q[1:], k[1:])


@remedy("first_only=True takes neither all_layers nor lengths; pack the samples with cu_seqlens")
def _(told):
    config = LongNetConfig(vocab_size=None, embed_dim=16, num_layers=2, num_heads=2, pattern=PATTERN)
    encoder, x = LongNetEncoder(config).eval(), torch.randn(2, 10, 16)
    with told():
        encoder(x, lengths=[10, 6], first_only=True)
    packed = torch.cat((x[0], x[1, :6]))[None]
    out = encoder(packed, cu_seqlens=torch.tensor([0, 10, 16]), first_only=True)
    same(out[0], encoder(x, lengths=[10, 6])[:, 0])


@remedy("Give the pixels of the tiles' corners, not fractions or numbers of a grid")
def _(told):
    model, tiles = slide_encoder(), torch.randn(1, 30, 8)
    grid = torch.stack((torch.arange(30) // 6, torch.arange(30) % 6), 1)[None]
    for coords in (grid, grid / 8):
        with told(UserWarning):
            model(tiles, coords)
    assert model(tiles, grid * 256).isfinite().all()


@remedy(
    "the checkpoint is of an encoder-decoder, which is not supported; give the prefix of its encoder's names to load "
    'that half, such as prefix="encoder."'
)
def _(told):
    weights, options = encoder_decoder_weights(), {**BRANCHES, "num_heads": 4}
    with told():
        load_torchscale(weights, **options)
    found = load_torchscale(weights, **options, prefix="encoder.")
    assert isinstance(found, LongNetEncoder)
    assert torch.equal(found.norm.weight, weights["encoder.layer_norm.weight"])


@remedy("the checkpoint holds weights twice, wrapped and not; give prefix=. It has {}")
def _(told):
    weights, options = golden()
    twice = {**weights, **{f"module.{name}": 2 * x for name, x in weights.items()}}
    with told():
        load_torchscale(twice, **options)
    found = load_torchscale(twice, **options, prefix="module.").state_dict()
    expected = load_torchscale({name: 2 * x for name, x in weights.items()}, **options).state_dict()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


@remedy("Undo what was added (merge LoRA, remove parametrizations and torch.compile of parts), or make a model of a {}")
def _(told, tmp_path):
    model, tokens = language_model(), torch.randint(20, (1, 9))
    expected = model(tokens)
    project = next(module for module in model.blocks.modules() if isinstance(module, nn.Linear))
    nn.utils.parametrizations.weight_norm(project)
    with told():
        model.save_pretrained(tmp_path)
    nn.utils.parametrize.remove_parametrizations(project, "weight")
    model.save_pretrained(tmp_path)
    same(LongNetLM.from_pretrained(tmp_path)(tokens), expected)
    model.blocks.append(copy.deepcopy(model.blocks[0]))
    with told():
        model.save_pretrained(tmp_path)
    made = language_model(num_layers=2)
    made.load_state_dict(model.state_dict())
    made.save_pretrained(tmp_path)
    assert torch.equal(LongNetLM.from_pretrained(tmp_path)(tokens), model(tokens))


@remedy("Gather the weights ({}), load them into a model of the same configuration and save that", ON_TWO_RANKS)
def _(told, mesh):
    model, tokens = language_model(), torch.randint(20, (1, 9))
    expected = model(tokens)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    with tempfile.TemporaryDirectory() as folder:
        with told():
            model.save_pretrained(folder)
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0:
            made = language_model()
            made.load_state_dict(weights)
            made.save_pretrained(folder)
            same(LongNetLM.from_pretrained(folder)(tokens), expected)


# ---- transformers

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60, "intermediate_size": 48}
WHOLE = {"segment_lengths": [64], "dilation_rates": [1]}
NESTED = {"segment_lengths": [8, 32], "dilation_rates": [1, 2]}


@pytest.fixture
def llama():
    return _model("Llama", num_key_value_heads=2)


def _model(name: str, head: str = "ForCausalLM", **options: Any) -> Any:
    kind = getattr(transformers, name + head)
    config = kind.config_class(**TINY, initializer_range=0.2, pad_token_id=0, **options)
    return kind._from_config(config, attn_implementation="eager").eval()


def _tokens(seq: int = 12, batch: int = 2) -> Tensor:
    return torch.randint(3, 60, (batch, seq))


def _dilated(model: Any, **branches: Any) -> Any:
    return huggingface.dilate(copy.deepcopy(model), **branches or WHOLE)


@remedy("the probabilities are never formed; use dilated_attention.attention_weights on q and k")
def _(told):
    model, tokens, seen = _model("Bert", "ForMaskedLM"), _tokens(), {}
    ours = _dilated(model)
    with told():
        ours(tokens, output_attentions=True)
    layer = ours.bert.encoder.layer[0].attention.self
    for name in ("query", "key"):
        project = getattr(layer, name)
        project.register_forward_hook(lambda module, inputs, out, name=name: seen.update({name: out}))
    ours(tokens)
    q, k = (seen[name].unflatten(-1, (4, 8)) for name in ("query", "key"))
    weights = attention_weights(q, k, Dilated((64,), (1,))).to_dense()
    same(weights, model(tokens, output_attentions=True).attentions[0])


@remedy("packed sequences are not supported; pad them and give attention_mask")
def _(told, llama):
    _packed(told, llama, cu_seq_lens_q=torch.tensor([0, 5, 12], dtype=torch.int32))


@remedy("For packed sequences, pad them and give attention_mask; give it too under torch.compile, {}")
def _(told, llama):
    _packed(told, llama, position_ids=torch.tensor([[*range(5), *range(7)]]), use_cache=False)


def _packed(told: Told, llama: Any, **packing: Any) -> None:
    tokens = _tokens(12, 1)
    with told():
        _dilated(llama)(tokens, **packing)
    samples = [tokens[0, :5], tokens[0, 5:]]
    padded = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    real = torch.arange(7) < torch.tensor([[5], [7]])
    logits = _dilated(llama)(padded, attention_mask=real.long()).logits
    for row, sample in zip(logits, samples, strict=True):
        same(row[: len(sample)], llama(sample[None]).logits[0])


@remedy("paged caches are not supported; generate with the dynamic cache")
def _(told, llama):
    ours, tokens = _dilated(llama), _tokens(6, 1)
    with told():
        ours(tokens, cache=object(), use_cache=False)
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 3, "do_sample": False}
    out = ours.generate(tokens, cache_implementation="dynamic", **options)
    assert torch.equal(out, llama.generate(tokens, **options))


@remedy('with the dynamic cache, which holds all tokens, is supported: cache_implementation="dynamic"')
def _(told, llama):
    ours, tokens = _dilated(llama), _tokens(6, 1)
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 3, "do_sample": False}
    with told():
        ours.generate(tokens, cache_implementation="static", **options)
    out = ours.generate(tokens, cache_implementation="dynamic", **options)
    assert torch.equal(out, llama.generate(tokens, **options))


@remedy("set it there, or call dilate(model) without it")
def _(told):
    text = {**TINY, "model_type": "llama"}
    vision = {**TINY, "image_size": 8, "patch_size": 4, "model_type": "clip_vision_model"}
    options = {"segment_lengths": [8], "dilation_rates": [1]}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_id=1)
    whole = copy.deepcopy(config)
    whole.dilated_attention = options
    with told():
        transformers.LlavaForConditionalGeneration(whole)
    config._attn_implementation = "dilated_attention"
    config.text_config.dilated_attention = options
    model, tokens = transformers.LlavaForConditionalGeneration(config).eval(), _tokens()
    found = model(input_ids=tokens).logits
    same(huggingface.dilate(model, [8], [1])(input_ids=tokens).logits, found)


@remedy("choose full layers, or leave the model as it is")
def _(told):
    from transformers_families import build

    model, tokens = build("gemma3", huggingface.NAME), _tokens()
    every = partial(routing.topk_blocks, density=1.0, block_size=8)
    expected = model(input_ids=tokens).logits
    with told():
        huggingface.sparsify(model, every, layers=[0])
    same(huggingface.sparsify(model, every, layers=[1], first=0)(input_ids=tokens).logits, expected)


@remedy("make the model without replace_attention for them")
def _(told, llama):
    options = {"attention_window": 8, "max_position_embeddings": 64, "pad_token_id": 0}
    theirs = transformers.LongformerModel(transformers.LongformerConfig(**TINY, **options)).eval()
    ours, tokens = copy.deepcopy(theirs), _tokens()
    longformer_bigbird.replace_attention(ours)
    with told():
        ours(tokens, output_attentions=True)
    assert theirs(tokens, output_attentions=True).attentions
    same(ours(tokens)[0], theirs(tokens)[0])


@remedy("choose a model that hands it to its attention alone")
def _(told, llama):
    doge = transformers.DogeModel(transformers.DogeConfig(**TINY, num_key_value_heads=2))
    tokens = _tokens()
    with told():
        _dilated(doge)(tokens)
    same(_dilated(llama)(tokens).logits, llama(tokens).logits)


@remedy("choose a model whose class has _supports_attention_backend")
def _(told, llama):
    with told():
        _dilated(transformers.MPNetModel(transformers.MPNetConfig(**TINY)))
    assert type(llama)._supports_attention_backend
    tokens = _tokens()
    same(_dilated(llama)(tokens).logits, llama(tokens).logits)


@remedy("Longformer, LED and BigBird take {}replace_attention")
def _(told):
    config = transformers.LongformerConfig(**TINY, attention_window=4, pad_token_id=1)
    with told():
        transformers.LongformerModel._from_config(copy.deepcopy(config), attn_implementation="dilated_attention")
    model, tokens = transformers.LongformerModel(config).eval(), _tokens(16)
    expected = model(tokens).last_hidden_state
    longformer_bigbird.replace_attention(model)
    same(model(tokens).last_hidden_state, expected)


@remedy("need a model's own attention; choose a model without one")
def _(told, llama):
    with told():
        _dilated(_model("Gemma2", num_key_value_heads=2, head_dim=8))
    assert getattr(llama.config, "attn_logit_softcapping", None) is None
    _dilated(llama)


@remedy('leave attn_implementation out, or call model.set_attn_implementation("{}")')
def _(told, llama, tmp_path):
    ours, tokens = _dilated(llama, **NESTED), _tokens(40)
    ours.save_pretrained(tmp_path)
    kind = type(llama)
    with told(UserWarning):
        other = kind.from_pretrained(tmp_path, attn_implementation="sdpa")
    same(other(tokens).logits, llama(tokens).logits)
    other.set_attn_implementation("dilated_attention")
    assert torch.equal(kind.from_pretrained(tmp_path)(tokens).logits, ours(tokens).logits)
    assert torch.equal(other(tokens).logits, ours(tokens).logits)


@remedy("If it holds one, give that one; nn.MultiheadAttention is for {}convert_attention")
def _(told, llama):
    holder, tokens = nn.ModuleDict({"model": llama}), _tokens()
    expected = llama(tokens).logits
    with told():
        huggingface.dilate(holder, **WHOLE)
    huggingface.dilate(holder["model"], **WHOLE)
    same(holder["model"](tokens).logits, expected)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with told():
        huggingface.dilate(layer, **WHOLE)
    assert convert_attention(layer, **WHOLE) == ["self_attn"]


@remedy("choose a model that counts from 0")
def _(told):
    with told():
        huggingface.extend_positions(transformers.YosoModel(transformers.YosoConfig(**TINY)), 5000)
    bert, tokens = _model("Bert", "ForMaskedLM", max_position_embeddings=16), _tokens(16)
    expected = bert(tokens).logits
    same(huggingface.extend_positions(bert, 40)(tokens).logits, expected)


@remedy("an image model interpolates its own: give its forward interpolate_pos_encoding=True")
def _(told):
    vit = transformers.ViTModel(transformers.ViTConfig(**TINY, image_size=16, patch_size=4)).eval()
    with told():
        huggingface.extend_positions(transformers.T5EncoderModel(transformers.T5Config(d_model=8, num_layers=1)), 40)
    out = _dilated(vit)(torch.randn(1, 3, 32, 32), interpolate_pos_encoding=True)
    assert out.last_hidden_state.shape == (1, 65, 32)


@remedy("and would change; the model takes longer texts as it is")
def _(told):
    rotation = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = _model("Llama", max_position_embeddings=16, rope_parameters=rotation)
    with told():
        huggingface.extend_positions(model, 40)
    tokens = _tokens(40)
    same(_dilated(model)(tokens).logits, model(tokens).logits)


@remedy("shorten the text (tokenizer(..., truncation=True)), or lengthen the table: extend_positions(model, length)")
def _(told):
    bert, tokens = _model("Bert", "ForMaskedLM", max_position_embeddings=16), _tokens(20)
    ours = _dilated(bert)
    with told():
        ours(tokens)
    same(ours(tokens[:, :16]).logits, bert(tokens[:, :16]).logits)
    huggingface.extend_positions(ours, 20)
    same(ours(tokens[:, :16]).logits, bert(tokens[:, :16]).logits)
    assert ours(tokens).logits.isfinite().all()


@remedy("Set it, or call dilated_attention.integrations.huggingface.dilate(model, segment_lengths, dilation_rates)")
def _(told, llama):
    expected, tokens = _dilated(llama, **NESTED), _tokens(40)
    bare = copy.deepcopy(llama)
    bare.set_attn_implementation("dilated_attention")
    bare.config.dilated_attention = [4]
    with told():
        bare(tokens)
    bare.config.dilated_attention = NESTED
    assert torch.equal(bare(tokens).logits, expected(tokens).logits)
    huggingface.dilate(llama, *NESTED.values())
    assert torch.equal(llama(tokens).logits, expected(tokens).logits)


@remedy("with a cache: use model.eval(), no past_key_values, or a model without attention dropout")
def _(told):
    model = _model("Llama", attention_dropout=0.5)
    ours, tokens = _dilated(model).train(), _tokens()
    with told():
        ours(tokens[:, -1:], past_key_values=ours(tokens[:, :-1], use_cache=True).past_key_values)
    ours.eval()
    past = ours(tokens[:, :-1], use_cache=True).past_key_values
    same(ours(tokens[:, -1:], past_key_values=past).logits, model(tokens).logits[:, -1:])
    assert ours.train()(tokens).logits.isfinite().all()
    model = _model("Llama", attention_dropout=0.0)
    ours = _dilated(model).train()
    past = ours(tokens[:, :-1], use_cache=True).past_key_values
    same(ours(tokens[:, -1:], past_key_values=past).logits, model(tokens).logits[:, -1:])


@remedy("masks over pairs are not supported; give a mask over tokens, (batch, seq)")
def _(told, llama):
    tokens, real = _tokens(), torch.ones(2, 12, dtype=torch.int64)
    real[1, 8:] = 0
    seen = real.bool()[:, None, None] & torch.ones(12, 12, dtype=torch.bool).tril()
    pairs = torch.zeros(2, 1, 12, 12).masked_fill(~seen, -torch.inf)
    with told():
        _dilated(llama)(tokens, attention_mask=pairs)
    out = _dilated(llama)(tokens, attention_mask=real).logits
    same(out[real.bool()], llama(tokens, attention_mask=pairs).logits[real.bool()])


# ---- commands


def told_by_command(told: Told, capsys: Any, *words: object) -> str:
    try:
        code = main([str(word) for word in words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    return told.printed(capsys.readouterr().err)


def succeeds(capsys: Any, *words: object) -> str:
    assert main([str(word) for word in words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


_SIZE = {
    "--context": 64, "--steps": 2, "--layers": 1, "--dim": 16, "--heads": 2, "--warmup": 1, "--held-out": 1,
    "--sample": 4,
}  # fmt: skip
TRAIN = [word for item in _SIZE.items() for word in item]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").write_bytes(bytes(1 + i * i % 250 for i in range(5000)))
    return tmp_path / "text"


@pytest.fixture
def out(tmp_path, text, capsys):
    """The folder of a run that has ended."""
    succeeds(capsys, "train", text, "--out", tmp_path / "out", *TRAIN)
    return tmp_path / "out"


def figures(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


@remedy("{}: error: {}; see {} --help")
def _(told, capsys):
    said = told_by_command(told, capsys, "suggest", "--tokens", "x")
    with pytest.raises(SystemExit, match="0"):
        main(re.findall(r"see dilated-attention (.*--help)", said)[0].split())
    assert "--tokens" in capsys.readouterr().out


@remedy("the weights do not tell; give both")
def _(told, tmp_path, capsys):
    case = Golden("ts_longnet_decoder_xpos")
    save_file(case.weights, tmp_path / "weights")
    words = ["convert", tmp_path / "weights", tmp_path / "out", "--kind", "torchscale", "--heads", 4, "--tokens", 20]
    told_by_command(told, capsys, *words)
    lists = (",".join(map(str, case.options[name])) for name in ("segment_lengths", "dilation_rates"))
    succeeds(capsys, *words, "--segments", next(lists), "--rates", next(lists))
    LongNetLM.from_pretrained(tmp_path / "out")


@remedy("--kind {} has only one: leave --architecture out")
def _(told, tmp_path, capsys):
    save_file(longvit_weights(), tmp_path / "weights")
    words = ["convert", tmp_path / "weights", tmp_path / "out", "--kind", "longvit"]
    branches = ["--heads", 4, "--segments", "8,16", "--rates", "1,2", "--tokens", 20]
    told_by_command(told, capsys, *words, "--architecture", "encoder", *branches)
    succeeds(capsys, *words, *branches)


@remedy("exists: give overwrite=True, or another folder")
def _(told, tmp_path, capsys):
    save_file(longvit_weights(), tmp_path / "weights")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    branches = ["--kind", "longvit", "--heads", 4, "--segments", "8,16", "--rates", "1,2", "--tokens", 20]
    options = {"segment_lengths": [8, 16], "dilation_rates": [1, 2], "num_heads": 4, "tokens": 20}
    with told():
        convert(tmp_path / "weights", tmp_path / "out", "longvit", **options)
    convert(tmp_path / "weights", tmp_path / "out", "longvit", **options, overwrite=True)
    command = Told("exists: give --overwrite, or another folder")
    told_by_command(command, capsys, "convert", tmp_path / "weights", tmp_path / "out", *branches)
    succeeds(capsys, "convert", tmp_path / "weights", tmp_path / "out", *branches, "--overwrite")
    succeeds(capsys, "convert", tmp_path / "weights", tmp_path / "other", *branches)


@remedy("; use 'cpu'")
def _(told, tmp_path, capsys):
    language_model(vocab_size=256).save_pretrained(tmp_path / "model")
    words = ["generate", tmp_path / "model", "--bytes", 2, "--device"]
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    told_by_command(told, capsys, *words, "cuda")
    succeeds(capsys, *words, "cpu")


@remedy("{} is not installed: pip install {}")
def _(told, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with told(ImportError):
        Dilated((8,), (1,)).plot(16)
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    (extra,) = re.findall(r"^plot = \[(.*)\]", project, re.MULTILINE)
    assert re.findall(r'"([a-z]+)', extra) == ["matplotlib"]


@remedy("exists: give --resume to continue it, --overwrite, or another --out")
def _(told, text, out, capsys):
    before = figures(out)
    told_by_command(told, capsys, "train", text, "--out", out, *TRAIN)
    succeeds(capsys, "train", "--out", out, "--resume", "--steps", 3)
    assert [row["bits_per_byte"] for row in figures(out)][:2] == [row["bits_per_byte"] for row in before]
    succeeds(capsys, "train", text, "--out", out.with_name("other"), *TRAIN)
    succeeds(capsys, "train", text, "--out", out, *TRAIN, "--overwrite")
    assert [row["bits_per_byte"] for row in figures(out)] == [row["bits_per_byte"] for row in before]


@remedy("but no checkpoint: give --overwrite, or another --out")
def _(told, text, out, capsys):
    shutil.rmtree(out / "checkpoint")
    told_by_command(told, capsys, "train", text, "--out", out, *TRAIN)
    succeeds(capsys, "train", text, "--out", out, *TRAIN, "--overwrite")
    succeeds(capsys, "train", text, "--out", out.with_name("other"), *TRAIN)


@remedy("leave that option out to continue it")
def _(told, text, out, capsys):
    told_by_command(told, capsys, "train", "--out", out, "--resume", "--dim", 32)
    succeeds(capsys, "train", "--out", out, "--resume")


@remedy("or give more steps")
def _(told, text, out, capsys):
    told_by_command(told, capsys, "train", "--out", out, "--resume", "--steps", 1)
    succeeds(capsys, "train", "--out", out, "--resume", "--steps", 3)
    assert len(figures(out)) == 3


@remedy("or give another --out")
def _(told, text, out, capsys):
    told_by_command(told, capsys, "train", text, "--out", out, "--resume", "--dim", 32)
    other = [*TRAIN, "--dim", 32, "--out", out.with_name("other")]
    succeeds(capsys, "train", text, *other)


@remedy("remove it to resume with the options' defaults")
def _(told, out, capsys):
    (out / "options.json").write_text("{")
    told_by_command(told, capsys, "train", "--out", out, "--resume", "--steps", 3)
    (out / "options.json").unlink()
    succeeds(capsys, "train", "--out", out, "--resume", "--steps", 3)


@remedy("it will be learned by heart; give more text or fewer --steps")
def _(told, text):
    config = LongNetConfig(embed_dim=16, num_layers=1, num_heads=2, pattern=PATTERN)

    def forecast(size: int, steps: int) -> str:
        text.write_bytes(bytes(1 + i * i % 250 for i in range(size)))
        recipe = Recipe(context=64, steps=steps, batch_size=1)
        return session.forecast(Training(config, recipe, read_text([text]), device=torch.device("cpu")))

    told.printed(forecast(5000, 10_000))
    for size, steps in ((500_000, 10_000), (5000, 10)):
        assert "by heart" not in forecast(size, steps)


@remedy("one window to learn from and one held out; give more text or a shorter --context")
def _(told, text, tmp_path, capsys):
    text.write_bytes(b"0123456789" * 10)
    told_by_command(told, capsys, "train", text, "--out", tmp_path / "out", *TRAIN)
    succeeds(capsys, "train", text, "--out", tmp_path / "out", *TRAIN, "--context", 32)
    text.write_bytes(b"0123456789" * 20)
    succeeds(capsys, "train", text, "--out", tmp_path / "more", *TRAIN)


@remedy("whose files would be read as text; give another --out")
def _(told, text, tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    text.rename(folder / "text")
    told_by_command(told, capsys, "train", folder, "--out", folder, *TRAIN)
    succeeds(capsys, "train", folder, "--out", tmp_path / "out", *TRAIN)


@remedy("parameters need {} bytes to train, and {} has {}; make the model smaller")
def _(told, text, tmp_path, capsys):
    told_by_command(told, capsys, "train", text, "--out", tmp_path / "out", *TRAIN, "--dim", 1 << 20)
    succeeds(capsys, "train", text, "--out", tmp_path / "out", *TRAIN, "--dim", 16)


@remedy("nothing is saved in {} yet: start again")
def _(told, text, tmp_path, capsys):
    session.remember(tmp_path / "out", session.OPTIONS)  # lost before its first checkpoint
    told.printed(train._onwards(tmp_path / "out"))
    succeeds(capsys, "train", text, "--out", tmp_path / "out", *TRAIN)


def _lower_rate(told: Told, text: Path, tmp_path: Path, capsys: Any, *options: object) -> None:
    words = [*TRAIN, "--warmup", 0, *options]
    assert main(["train", *map(str, [text, "--out", tmp_path / "high", *words, "--lr", "1e30"])]) == 1
    told.printed(capsys.readouterr().err)
    succeeds(capsys, "train", text, "--out", tmp_path / "low", *words, "--lr", "1e-3")


@remedy("step {}: loss {}, gradient norm {}; try a lower --lr")
def _(told, text, tmp_path, capsys):
    _lower_rate(told, text, tmp_path, capsys, "--steps", 20)


@remedy("held-out text takes {} bits per byte; try a lower --lr")
def _(told, text, tmp_path, capsys):
    _lower_rate(told, text, tmp_path, capsys, "--steps", 1)


@remedy("is empty: give at least one character")
def _(told, tmp_path, capsys):
    language_model(vocab_size=256).save_pretrained(tmp_path / "model")
    words = ["generate", tmp_path / "model", "--bytes", 2, "--prompt"]
    told_by_command(told, capsys, *words, "")
    succeeds(capsys, *words, "x")


@remedy("--budget 1 is one key per query. Give 1.0 for the cost of dense attention")
def _(told, capsys):
    words = ["suggest", "--tokens", 1000, "--heads", 8, "--budget"]
    told_by_command(told, capsys, *words, "1")
    assert "100.0% of dense attention" in succeeds(capsys, *words, "1.0").replace("100.00%", "100.0%")


# ---- windows, sums and positions


@remedy("leave compat out")
def _(told):
    q, k, v = tensors()
    pattern = dataclasses.replace(PATTERN, compat="torchscale")
    with told():
        attention(q[:, 8:], k, v, pattern, is_causal=True, q_start=8)
    exact = dataclasses.replace(pattern, compat=None)
    found = attention(q[:, 8:], k, v, exact, is_causal=True, q_start=8)
    torch.testing.assert_close(found, attention(q, k, v, exact, is_causal=True)[:, 8:])


@remedy("give the product a BlockLayout, or make one call per sample")
def _(told):
    q, k, v = tensors()
    segments = Dilated([8], [1])
    with told():
        attention(q[:, 8:], k, v, segments * (lambda n: BlockLayout.local(n, 4, 4)), q_start=8, lengths=[12])
    product = segments * BlockLayout.local(8, 4, 4)
    found = attention(q[:, 8:], k, v, product, q_start=8, lengths=[12])
    expected = attention(q[:, 8:12], k[:, :12], v[:, :12], segments * (lambda n: BlockLayout.local(n, 4, 4)), q_start=8)
    torch.testing.assert_close(found[:, :4], expected)


@remedy("explain the whole sequence")
def _(told):
    q, k, v = tensors()
    layout = BlockLayout.local(16, 4, 4)
    with told():
        explain(q[:, 8:], k, v, layout, is_causal=True, q_start=8)
    assert explain(q, k, v, layout, is_causal=True).flops > 0


@remedy("make one call per sample")
def _(told):
    q, k, v = tensors()
    with told():
        attention(q[:, 12:], k, v, Window(4), is_causal=True, q_start=12, cu_seqlens=torch.tensor([0, 4]))
    found = attention(q[:, 12:], k, v, Window(4), is_causal=True, q_start=12)
    torch.testing.assert_close(found, attention(q, k, v, Window(4), is_causal=True)[:, 12:])


@remedy("give their sum, Window(...) + layout, or a layout alone, BlockLayout.local")
def _(told):
    layout, (q, k, v) = BlockLayout.local(16, 4, 4), tensors()
    with told():
        Window(4) * layout
    assert attention(q, k, v, Window(4) + layout).isfinite().all()


@remedy("the zero keys of released checkpoints belong to one pattern; use {}")
def _(told):
    q, k, v = tensors()
    with told() as caught:
        Window(4) + dataclasses.replace(PATTERN, compat="torchscale")
    pattern = eval(str(caught.value).split("; use ")[1], {"Dilated": Dilated})
    assert attention(q, k, v, Window(4) + pattern).isfinite().all()


@remedy("its layouts are calls of their own; give each of pattern.parts")
def _(told):
    q, k, v = tensors()
    pattern = Window(4) + BlockLayout.local(16, 4, 4)
    with told():
        explain(q, k, v, pattern)
    assert all(explain(q, k, v, part).flops > 0 for part in pattern.parts)


@remedy("leave q_start and k_start out: the shards say where tokens lie", ON_TWO_RANKS)
def _(told, mesh):
    q, k, v = tensors(8)
    with told():
        attention(q, k, v, PATTERN, mesh=mesh, q_start=8)
    assert attention(q, k, v, PATTERN, mesh=mesh).isfinite().all()


@remedy("a SelectionCache holds the tokens of one device; over a mesh pass None", ON_TWO_RANKS)
def _(told, mesh):
    layer, x = BlockAttentionMixture(16, 2, block_size=4, query_block=2), torch.randn(1, 8, 16)
    parallel.set_context_parallel(layer, mesh)
    with told():
        layer(x, cache=SelectionCache())
    assert layer(x).shape == x.shape


# ---- a transformers model's own attention


@remedy('load the model with attn_implementation="sdpa"')
def _(told):
    model = _model("Llama")
    model.set_attn_implementation("dilated_attention")
    tokens = _tokens()
    scores = torch.rand(*tokens.shape, tokens.shape[1])[:, None]
    with told():
        model(tokens, attention_mask=scores)
    model.set_attn_implementation("sdpa")
    assert model(tokens, attention_mask=scores).logits.isfinite().all()


@remedy("a bias of scores; give booleans, or {}")
def _(told):
    model = _model("Llama")
    tokens = _tokens()
    pairs = torch.ones(*tokens.shape, tokens.shape[1], dtype=torch.bool).tril()[:, None]
    expected = model(tokens, attention_mask=torch.where(pairs, 0.0, torch.finfo(torch.float32).min)).logits
    model.set_attn_implementation("dilated_attention")
    with told():
        model(tokens, attention_mask=pairs.float())
    same(model(tokens, attention_mask=pairs).logits, expected)


@remedy("a dilated layer takes no position_bias with padding before the tokens; pad after them")
def _(told):
    config = transformers.T5Config(vocab_size=60, d_model=16, d_kv=4, d_ff=16, num_layers=1)
    model = huggingface.dilate(transformers.T5EncoderModel(config).eval(), [16], [1])
    tokens = _tokens()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with told():
        model(tokens, attention_mask=mask)
    after = tokens.roll(-3, 1)
    mask = mask.flip(1)
    found = model(after, attention_mask=mask).last_hidden_state
    model.set_attn_implementation("eager")
    same(found[mask.bool()], model(after, attention_mask=mask).last_hidden_state[mask.bool()])


@remedy('has not called this library yet; load it with attn_implementation="{}" and run a forward first')
def _(told):
    model = _model("Llama")
    with told():
        huggingface.report(model)
    model.set_attn_implementation("dilated_attention")
    model(_tokens())
    assert "all keys" in huggingface.report(model)


# ---- arguments of other libraries


def as_theirs(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def refuses(told: Told, q: Tensor, k: Tensor, v: Tensor, *names: str) -> None:
    """Expect the remedy from each public call."""
    layout = BlockLayout.local(16, 4, 4)
    for name in names:
        for call in (
            lambda **given: attention(q, k, v, PATTERN, **given),
            lambda **given: dilated_attention.dilated_attention(q, k, v, [8], [1], **given),
            lambda **given: dilated_attention.block_sparse_attention(q, k, v, layout, **given),
            lambda **given: explain(q, k, v, PATTERN, **given),
        ):
            with told(TypeError) as caught:
                call(**{name: None})
            assert str(caught.value).startswith(f"unknown argument '{name}'; ")


@remedy("give key_padding_mask=, True for hidden keys, or is_causal=True; a mask over pairs of tokens is a pattern, "
        "BlockLayout.from_mask(mask, block_size=1)")  # fmt: skip
def _(told):
    q, k, v = tensors()
    refuses(told, q, k, v, "attn_mask", "attention_mask", "mask")
    shown = (torch.rand(16, 16) < 0.5) | (torch.eye(16) > 0)
    same(attention(q, k, v, BlockLayout.from_mask(shown, block_size=1)), as_theirs(q, k, v, attn_mask=shown))
    real = torch.arange(16)[None] < 11
    same(
        attention(q, k, v, Dilated([16], [1]), key_padding_mask=~real),
        as_theirs(q, k, v, attn_mask=real[:, None, None]),
    )


@remedy("give is_causal=")
def _(told):
    q, k, v = tensors()
    refuses(told, q, k, v, "causal")
    same(attention(q, k, v, Dilated([16], [1]), is_causal=True), as_theirs(q, k, v, is_causal=True))


@remedy("give dropout_p=")
def _(told):
    q, k, v = tensors()
    refuses(told, q, k, v, "dropout")
    assert (attention(q, k, v, PATTERN, dropout_p=0.5) - attention(q, k, v, PATTERN)).abs().max() > 0.1


@remedy("give a window as the pattern, Window(before, after)")
def _(told):
    q, k, v = tensors()
    refuses(told, q, k, v, "window", "window_size")
    distance = torch.arange(16) - torch.arange(16)[:, None]
    same(attention(q, k, v, Window(3, 2)), as_theirs(q, k, v, attn_mask=(distance >= -3) & (distance <= 2)))


@remedy("give bias=: a tensor (batch or 1, heads or 1, queries, keys), or a form of dilated_attention.bias")
def _(told):
    q, k, v = tensors()
    refuses(told, q, k, v, "attn_bias", "position_bias")
    bias = torch.randn(1, q.shape[2], 16, 16)
    same(attention(q, k, v, Dilated([16], [1]), bias=bias), as_theirs(q, k, v, attn_mask=bias))


@remedy("coordinates take no gradient, but require one; give coordinates.detach()")
def _(told):
    q, k, v = tensors()
    slopes = torch.rand(q.shape[2])
    coordinates = torch.rand(1, 16, 2, requires_grad=True)
    with told():
        Alibi(slopes, coordinates)
    distance = torch.cdist(coordinates, coordinates)[0].detach()
    expected = as_theirs(q, k, v, attn_mask=-slopes[:, None, None] * distance)
    same(attention(q, k, v, Dilated([16], [1]), bias=Alibi(slopes, coordinates.detach())), expected)


@remedy("give bias=Alibi(alibi_slopes) of dilated_attention.bias")
def _(told):
    q, k, v = tensors()
    refuses(told, q, k, v, "alibi_slopes")
    slopes = torch.rand(q.shape[2])
    distance = (torch.arange(16) - torch.arange(16)[:, None]).abs()
    expected = as_theirs(q, k, v, attn_mask=-slopes[:, None, None] * distance)
    same(attention(q, k, v, Dilated([16], [1]), bias=Alibi(slopes)), expected)


@remedy("scores take no function; give bias=, softcap= or sinks= if that is what it computes, or use FlexAttention")
def _(told):
    q, k, v = tensors()
    refuses(told, q, k, v, "score_mod")
    score = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    capped = torch.einsum("bhij,bjhd->bihd", (2 * (score / 2).tanh()).softmax(-1), v)
    same(attention(q, k, v, Dilated([16], [1]), softcap=2.0), capped)


@remedy("give scale=")
def _(told):
    q, k, v = tensors()
    refuses(told, q, k, v, "softmax_scale")
    same(attention(q, k, v, Dilated([16], [1]), scale=0.1), as_theirs(q, k, v, scale=0.1))


@remedy("leave it out: k and v may always have fewer heads than q")
def _(told):
    q, k, v = tensors(kv_heads=2)
    refuses(told, q, k, v, "enable_gqa")
    same(attention(q, k, v, Dilated([16], [1])), as_theirs(q, k, v, enable_gqa=True))


@remedy("give BlockLayout.from_block_mask(block_mask) as the pattern")
def _(told):
    q, k, v = tensors()
    refuses(told, q, k, v, "block_mask")
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu", BLOCK_SIZE=4)
    same(attention(q, k, v, BlockLayout.from_block_mask(mask)), as_theirs(q, k, v, is_causal=True))


@remedy("see help(dilated_attention.attention)")
def _(told):
    q, k, v = tensors()
    refuses(told, q, k, v, "causl")
    assert "is_causal" in inspect.getdoc(attention)


@remedy("compare, as in q_idx >= kv_idx")
def _(told):
    with told():
        BlockLayout.from_mask_mod(lambda b, h, q_idx, kv_idx: q_idx - kv_idx, 16, block_size=8)
    layout = BlockLayout.from_mask_mod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, 16, block_size=8)
    assert torch.equal(layout.dense_mask()[0, 0], torch.ones(16, 16).tril() > 0)


@remedy("BSR holds whole blocks, and the layout has masks inside blocks; give to_block_mask()")
def _(told):
    layout = BlockLayout.from_mask_mod(_prefix, 16, block_size=8)
    with told():
        layout.to_torch_sparse()
    assert BlockLayout.from_block_mask(layout.to_block_mask()) == layout


@remedy("is_causal=True contradicts a mask that shows a later key; give mask.tril()")
def _(told):
    mask = torch.rand(16, 16) < 0.5
    with told():
        BlockLayout.from_mask(mask, 16, 4, is_causal=True)
    layout = BlockLayout.from_mask(mask.tril(), 16, 4, is_causal=True)
    assert torch.equal(layout.dense_mask()[0, 0], mask.tril())


@remedy("for cross-attention give q_start=0")
def _(told):
    """Compare all keys, and a mask of single tokens, for fewer queries than keys and for more."""
    for queries, keys in ((9, 16), (16, 9)):
        (q, _, _), (_, k, v) = tensors(queries), tensors(keys)
        with told():
            attention(q, k, v, Dilated([16], [1]))
        same(attention(q, k, v, Dilated([16], [1]), q_start=0), as_theirs(q, k, v))
        shown = torch.zeros(16, 16, dtype=torch.bool)
        shown[:queries, :keys] = torch.rand(queries, keys) < 0.5
        shown[:, 0] = True
        layout = BlockLayout.from_mask(shown, block_size=1)
        same(attention(q, k, v, layout, q_start=0), as_theirs(q, k, v, attn_mask=shown[:queries, :keys]))


def _prefix(batch, head, i, j):
    return (i >= j) | (j < 5)


@remedy("; for a mask_mod give BlockLayout.from_mask_mod(mask_mod, seq_len), or from_block_mask of its BlockMask; "
        "for a function that makes layouts give its layout of seq_len tokens")  # fmt: skip
def _(told):
    q, k, v = tensors()
    for call in (attention, dilated_attention.block_sparse_attention):
        with told() as caught:
            call(q, k, v, _prefix)
    names = {"mask_mod": _prefix, "seq_len": 16, "BlockLayout": BlockLayout}
    layout = eval(of(caught, r"(BlockLayout\.from_mask_mod\(mask_mod, seq_len\))"), names)
    expected = as_theirs(q, k, v, attn_mask=_prefix(0, 0, torch.arange(16)[:, None], torch.arange(16)))
    same(attention(q, k, v, layout), expected)
    with told():
        attention(q, k, v, lambda n: BlockLayout.local(n, 4, 4))
    assert attention(q, k, v, BlockLayout.local(16, 4, 4)).isfinite().all()
