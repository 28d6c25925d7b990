"""What errors and warnings tell users to do, done to the letter: it runs, and computes what the words promise.

A case is registered under the words of one message. It makes the wrong call inside `with told():`, which checks that
these words come, and then follows them. `test_every_remedy_has_a_case` looks for remedies in the source, so that a new
one needs a case here, the name of a test elsewhere, or a reason to have neither.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dilated_attention
from dilated_attention import (
    BlockLayout,
    Dilated,
    attention,
    attention_weights,
    block_sparse_attention,
    explain,
    parallel,
    suggest_pattern,
)
from dilated_attention import (
    dilated_attention as dilated,
)
from dilated_attention.backends import cpu
from dilated_attention.decoding import cached_attention, first_token_attention, listed_attention
from dilated_attention.integrations import convert_attention
from dilated_attention.models import (
    LongNetConfig,
    LongNetEncoder,
)
from dilated_attention.nn import (
    BlockSparseDilatedAttention,
    DilatedAttention,
    MultiheadDilatedAttention,
    NativeSparseAttention,
    SelectionCache,
)
from dilated_attention.routing import PageBounds
from processes import run
from tolerances import TOLERANCE, relative_error

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore:Sparse BSR")]

SOURCE = Path(dilated_attention.__file__).parent
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


# ---- calls


@remedy("the kernels have no {}; use float32, bfloat16 or float16")
def _(told):
    q, k, v = tensors(dtype=torch.float64)
    with told():
        attention(q, k, v, PATTERN, backend="cpu")
    if cpu._load()[3]:
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


@remedy("without a mesh must be q's own length, {}; leave it out")
def _(told):
    q, k, v = tensors()
    with told():
        attention(q, k, v, PATTERN, seq_len=32)
    same(attention(q, k, v, PATTERN), oracle(q, k, v))


@remedy("over one rank must be q's own length, {}; leave it out")
def _(told, one_rank):
    q, k, v = tensors()
    with told():
        attention(q, k, v, PATTERN, mesh=one_rank, seq_len=32)
    same(attention(q, k, v, PATTERN, mesh=one_rank), oracle(q, k, v))


@remedy("give q.transpose(1, 2), k.transpose(1, 2) and v.transpose(1, 2)")
def _(told):
    q, k, v = (x.transpose(1, 2) for x in tensors(512, 4))
    with told(UserWarning):
        attention(q, k, v, PATTERN)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    same(attention(q, k, v, PATTERN), oracle(q, k, v))


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


@remedy("give q[:, -1:]")
def _(told):
    q, k, v = tensors()
    blocks = torch.tensor([[[0, 2]]])
    with told():
        listed_attention(q, k, v, blocks, 4)
    out = listed_attention(q[:, -1:], k, v, blocks, 4)
    seen = [*range(4), *range(8, 12)]
    same(out, _dense(q[:, -1:], k[:, seen], v[:, seen]))


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * q.shape[3] ** -0.5
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.double())


@remedy("give attention the whole sequence, or listed_attention the key blocks of its newest token")
def _(told):
    q, k, v = tensors()
    layout = BlockLayout.local(16, 5, 4)
    with told():
        cached_attention(q[:, -1:], k, v, layout)
    expected = oracle(q, k, v, layout, is_causal=True)[:, -1:]
    same(attention(q, k, v, layout, is_causal=True)[:, -1:], expected)
    last = layout.indices[layout.indptr[0, 0, -2] :]
    same(listed_attention(q[:, -1:], k, v, last[None, None], 4), expected)


@remedy("mesh under torch.func.vmap: fold the mapped dimension into the batch", ON_TWO_RANKS)
def _(told, mesh):
    q, k, v = (x.unflatten(0, (3, 1)) for x in tensors(batch=3))
    mine = [shard(x.flatten(0, 1), mesh).unflatten(0, (3, 1)) for x in (q, k, v)]
    with told():
        torch.func.vmap(lambda q, k, v: attention(q, k, v, PATTERN, mesh=mesh))(*mine)
    out = attention(*(x.flatten(0, 1) for x in mine), PATTERN, mesh=mesh)
    same(whole(out, mesh), oracle(*(x.flatten(0, 1) for x in (q, k, v))))


# ---- patterns


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


@remedy("entries for heads {} to {}; of a larger module give head_offset")
def _(told):
    q, k, v = tensors(heads=8)
    table = Dilated((8, 16), (1, 2), [[0] * 8, [0, 0, 0, 0, 1, 1, 1, 1]])
    with told():
        attention(*(x[:, :, 4:] for x in (q, k, v)), table)
    half = attention(*(x[:, :, 4:] for x in (q, k, v)), table, head_offset=4)
    same(half, oracle(q, k, v, table)[:, :, 4:])


@remedy("Lower the dilation rate or lengthen the segment")
def _(told):
    q, k, v = tensors()
    table = [[0] * 4, [2, 3, 4, 5]]
    with told():
        attention(q, k, v, Dilated((8, 2), (1, 6), table))
    for pattern in (Dilated((8, 2), (1, 2)), Dilated((8, 12), (1, 6), table)):
        same(attention(q, k, v, pattern), oracle(q, k, v, pattern))


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
    with told(UserWarning):
        Dilated((16,), (8,)).coverage(16, 4)
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


@remedy("cannot unite a layout with is_causal={} and one with is_causal={}; take .causal() of both")
def _(told):
    q, k, v = tensors()
    local, leading = BlockLayout.local(16, 4, 4, is_causal=True), BlockLayout.global_(16, 2, 4)
    with told():
        local | leading
    united = local.causal() | leading.causal()
    expected = BlockLayout.local(16, 4, 4) | leading
    same(attention(q, k, v, united), oracle(q, k, v, expected, is_causal=True))


@remedy("no keys to choose among; append those of the tokens so far")
def _(told):
    q, k, _ = tensors()
    bounds = PageBounds(4)
    with told():
        bounds.best(q[:, -1:], 2)
    bounds.append(k)
    assert (bounds.best(q[:, -1:], 2) == 3).any(-1).all()  # the newest page


# ---- modules


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


@remedy("padding that the matrix has no column for; pass need_weights=False")
def _(told):
    theirs, ours = theirs_and_ours(compat="torchscale")
    x = torch.randn(2, 12, 16)
    with told():
        ours(x, x, x, need_weights=True)
    same(ours(x, x, x, need_weights=False)[0], theirs(x, x, x)[0])


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


@remedy("runs on one device; over a mesh use nn.DilatedAttention")
def _(told, one_rank):
    layer = NativeSparseAttention(16, 2, **SELECTION)
    with told():
        parallel.set_context_parallel(layer, one_rank)
    module, (q, k, v) = DilatedAttention([8, 16], [1, 2]), tensors()
    parallel.set_context_parallel(module, one_rank)
    same(module(q, k, v), oracle(q, k, v))


@remedy('use a larger xpos_scale_base, a dtype of wider range, or positions="rope"')
def _(told):
    def model(dtype: torch.dtype = torch.float32, **options: Any) -> LongNetEncoder:
        config = {"vocab_size": None, "embed_dim": 16, "num_layers": 1, "num_heads": 2, "positions": "xpos"}
        config = config | {"xpos_scale_base": 1.0, "pattern": PATTERN} | options
        return LongNetEncoder(LongNetConfig(**config)).to(dtype)

    x = torch.randn(1, 200, 16)
    with told():
        model()(x)
    for served in (model(xpos_scale_base=512.0), model(torch.float64), model(positions="rope")):
        assert served(x.to(served.norm.weight.dtype)).isfinite().all()
