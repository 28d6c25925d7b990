"""Run calls on the CPU with our own C++ kernels (kernels/cpu). They read the tables of tiles that Triton uses too.

A launch (see `tiles.launched`) is one call of the library. For a tile of queries, it runs one loop and one softmax
over the keys of all spans that the tile sees. Tables are made once per plan and kernel.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from dilated_attention.backends import dropout, tiles
from dilated_attention.backends.cpu_bias import Entries, entries_of
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.jobs import Launch, Launches, launch_of
from dilated_attention.backends.problem import MOST_PREPARED, Layouts, Problem, Repeat
from dilated_attention.cache import plan_cache
from dilated_attention.kernels.configurations import Side
from dilated_attention.kernels.cpu import build
from dilated_attention.kernels.cpu.estimates import TYPES
from dilated_attention.layout import BlockLayout
from dilated_attention.layout.value import Transposed
from dilated_attention.merge import running
from dilated_attention.plan import Plan
from dilated_attention.scores import Scores

X86_SETS = ("none", "AVX2", "AVX-512", "AVX-512 with bfloat16", "AMX with bfloat16")
ARM64_SETS = ("none", "NEON", "NEON with bfloat16")
"""The names of an architecture's instruction sets. The index is the number used in kernels/cpu/dispatch.cpp."""
AVX512, AMX = map(X86_SETS.index, ("AVX-512", "AMX with bfloat16"))
KERNELS = {"forward": 0, "stats": 1, "dq": 2, "dkdv": 3}
ONE_THREAD = 2**19
"""The most work, in score entries times head_dim, that one thread does alone."""

READ = 16
"""Reading a key and its value from memory takes as long as this many of its score entries."""

MOST_IDLE = 1.3
"""The largest imbalance of threads at which the backward uses one kernel of five products, not two with seven in all.

It is `Launch.idle`, the time with whole jobs over perfect balance. The kernel of five has few, large jobs.
"""


def refusal(facts: Facts) -> str | None:
    """Return why this backend cannot serve a call, and what would serve it; None if it can."""
    if facts.device.type != "cpu":
        return f"the kernels run on CPUs, not {facts.device.type}"
    if _MISSING is not None:
        return _MISSING
    needs = set(facts.needs)
    if {"bias", "softcap"} <= needs:
        return "the kernels add no bias under a softcap; native does"
    if "bias" in needs and facts.over_mesh:
        return "the kernels add no bias to rows that other ranks sent; native does"
    if needs & {"a table over coordinates", "a bias of tokens in another order"}:
        return "the kernels add no table over coordinates, and to a neighborhood only a distance; native does"
    return tiles.refusal(facts, MAX_HEAD_DIM)


def on_request(facts: Facts) -> str | None:
    """Return why `auto` does not choose this backend for a call that it could serve; None if `auto` may."""
    if PROCESSOR.arm64:
        return (
            "the kernels have not been timed on arm64, so native comes first; backend='cpu' takes them. To change "
            "that, run `dilated-attention bench cpu --share` on such a machine and attach its file to an issue"
        )
    if facts.dtype == torch.bfloat16 and PROCESSOR.has_amx and not PROCESSOR.in_tiles(facts.dtype):
        return "native multiplies in the tiles of AMX, which this process did not get for the kernels"
    return None


# ---- the processor


@dataclass(frozen=True)
class Processor:
    """Hold facts of the machine on which the choice of a backend, and of the kernels' tiles and instructions, depends.

    Attributes:
        highest: the highest instruction set that the kernels support, as an index of `sets`.
        has_amx: whether PyTorch's own operators multiply bfloat16 in the tiles of AMX, even if this process did not
            get them for the kernels.
    """

    arm64: bool
    highest: int
    has_amx: bool = False

    @property
    def sets(self) -> tuple[str, ...]:
        """Return the names of the architecture's instruction sets."""
        return ARM64_SETS if self.arm64 else X86_SETS

    def set_of(self, dtype: torch.dtype) -> int:
        """Return the instruction set used for tensors of this dtype. Higher ones multiply bfloat16 numbers alone."""
        if dtype == torch.bfloat16 or self.in_halves(dtype):
            return self.highest
        return min(self.highest, 1 if self.arm64 else AVX512)

    def in_tiles(self, dtype: torch.dtype) -> bool:
        """Return whether tensors of this dtype are multiplied in the tile registers of AMX."""
        return self.set_of(dtype) == AMX

    def in_halves(self, dtype: torch.dtype) -> bool:
        """Return whether each number is split into a sum of two bfloat16 numbers, which AMX multiplies in three
        products.

        Float16 numbers are split, because the sum is exact. Float32 numbers are split only if
        `torch.set_float32_matmul_precision` is "high" or "medium"; out and gradients are then accurate to 3e-5.
        """
        if dtype == torch.bfloat16 or self.highest != AMX:
            return False
        if dtype == torch.float16:
            return True
        # Traced code cannot read the switch; the operator in the graph does.
        return not torch.compiler.is_compiling() and torch.get_float32_matmul_precision() != "highest"

    def most_few(self, dtype: torch.dtype) -> int:
        """Return the most rows per tile for which kernels/cpu/few.h runs a launch."""
        most = FEW_ON_ARM64 if self.arm64 else FEW
        return most[self.set_of(dtype)]


def instruction_set_of(dtype: torch.dtype) -> str:
    """Name the instruction set used for this dtype, and say whether each number is split into two bfloat16 halves."""
    name = PROCESSOR.sets[PROCESSOR.set_of(dtype)]
    if not PROCESSOR.in_halves(dtype):
        return name
    in_halves = f"{name}, each number as two"
    if dtype == torch.float32:
        return f"{in_halves}, by set_float32_matmul_precision"
    return in_halves


# ---- the library


def _load() -> tuple[ctypes.CDLL | None, Processor, str | None]:
    """Return (library or None, this machine's processor, why no kernel can run or None)."""
    arm64 = build.machine() == "arm64"
    library = build.load()
    if isinstance(library, str):
        return None, Processor(arm64, 0), library

    assert_same_fields(library)
    for name in ("instruction_set", "has_amx"):
        getattr(library, f"dilated_attention_{name}").restype = ctypes.c_int64
    highest = int(library.dilated_attention_instruction_set())
    has_amx = bool(library.dilated_attention_has_amx())
    why = None if highest else "the kernels need a processor with AVX2"
    return library, Processor(arm64, highest, has_amx), why


def missing() -> str | None:
    """Return why there are no kernels on this machine, and how to get them; None if there are."""
    return _MISSING


# ---- forward and backward


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, state: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return out, in q's dtype, and lse, float32, of a problem. Arguments and results are as in `native.forward`."""
    if state is None:
        state = running(q, problem.plan.covered)
    out, lse = state
    arguments = _Arguments(problem, q, k, v)
    arguments.set(out=out, lse=lse)
    arguments.set_bias("queries")
    for launch in launches(problem, q, "queries", forward=True):
        run("forward", arguments, launch)
    return out, lse


def prepare(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Repeat, int] | None:
    """Return a function that repeats `forward` on tensors like these, with dense rows and no dropout, and the bytes of
    the tables that it keeps; None if these exceed `MOST_PREPARED`."""
    found = launches(problem, q, "queries", forward=True)
    if not found:
        return None

    covered = problem.plan.covered
    arguments = _Arguments(problem, q, k, v)
    instructions = arguments.instructions
    kind = arguments.type
    calls = []
    nbytes = 0
    for launch in found:
        arguments.launch(launch)
        calls.append((bytes(arguments.call), launch, problem.layouts))  # whose tables and lists the call reads
        nbytes += launch.table.lines.nbytes + launch.jobs.nbytes
    if nbytes > MOST_PREPARED:
        return None

    group = problem.plan.groups[0]
    layout = problem.layouts[group.tokens] if problem.layouts is not None and group.tokens else None
    per_key = arguments.work / max(1, k.shape[1])
    lines_at = {(group.at, k.shape[1]): found[0].table.lines}  # at the latest place, which a model's layers share

    def repeat(
        q: Tensor, k: Tensor, v: Tensor, starts: tuple[int, int], hidden: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        if PROCESSOR.set_of(q.dtype) != instructions:
            return None
        keys = k.shape[1]
        shared = per_key * keys > ONE_THREAD
        lines = None
        if layout is not None:  # then there is one launch
            lines = lines_at.get((starts, keys))
            if lines is None:
                lines = tiles.moved(found[0].table, layout, starts, q.shape[1], keys)
                lines_at.clear()
                lines_at[starts, keys] = lines

        if hidden is not None:
            hidden = hidden.contiguous()
        out, lse = running(q, covered)
        for settled, *_ in calls:
            call = _Call.from_buffer_copy(settled)
            if hidden is not None:
                call.hidden = hidden.data_ptr()
            if lengths is not None:
                call.lengths = lengths.data_ptr()
            if lines is not None:
                call.lines = lines.data_ptr()
                call.M = keys
            call.q = q.data_ptr()
            call.k = k.data_ptr()
            call.v = v.data_ptr()
            call.qsb, call.qsn, call.qsh, _ = q.stride()
            call.ksb, call.ksn, call.ksh, _ = k.stride()
            call.vsb, call.vsn, call.vsh, _ = v.stride()
            call.out = out.data_ptr()
            call.lse = lse.data_ptr()
            call.threads = torch.get_num_threads() if shared else 1
            _run("forward", kind, instructions, call)
        return out, lse

    return repeat, nbytes


def backward(
    problem: Problem, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk, dv of a problem from the merged out and lse; `state`: running float32 sums to add to in place.

    A launch that is not `few` (see `Launch`) uses one kernel of five matrix products for all three gradients if there
    are enough independent jobs for all threads: tiles of keys that share queries form one job. Otherwise a kernel of
    four products computes dk and dv, and a kernel of three products computes dq.
    """
    arguments = _Arguments(problem, q, k, v)
    threads = arguments.call.threads
    plan = problem.plan

    together = launches(problem, q, "keys", owned=True)
    apart = tuple([i for i, x in enumerate(together) if x.few or x.idle(threads, q.shape[0]) > MOST_IDLE])
    which = apart if len(apart) < len(together) else None
    keys = launches(problem, q, "keys", which=which)
    queries = launches(problem, q, "queries", which=which)
    together = tuple([x for i, x in enumerate(together) if i not in apart])

    add_dkdv = state is not None or len(together) + len(keys) > 1
    add_dq = state is not None or bool(together) or len(queries) > 1
    if state is not None:
        dq, dk, dv = state
    else:
        every_query = plan.covered and problem.lengths is None
        every_key = every_query and plan.square and problem.hidden is None and q.numel() > 0
        dq = tiles.gradient(q, add_dq, every_query)
        dk = tiles.gradient(k, add_dkdv, every_key)
        dv = tiles.gradient(v, add_dkdv, every_key)
    out = out.contiguous()
    lse = lse.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    stats = lse.new_empty((*lse.shape, 2))
    arguments.set(dout=dout, out=out, lse=lse, dlse=dlse, stats=stats, dk=dk, dv=dv, add_dq=add_dq, add_dkdv=add_dkdv)

    arguments.set_bias("keys")
    if keys or together:
        run("stats", arguments, (*keys, *together)[0])
    for launch in keys:
        run("dkdv", arguments, launch)
    arguments.set(dq=dq)
    for launch in together:
        run("dkdv", arguments, launch)
    if arguments.bias is not None:
        arguments.bias.finish()
    arguments.set_bias("queries")
    for launch in queries:
        run("dq", arguments, launch)

    if state is not None:
        return state
    sums = [dv, dk, dq]
    del arguments, dq, dk, dv  # so that each sum is freed when its result exists
    return sums.pop().to(q.dtype), sums.pop().to(k.dtype), sums.pop().to(v.dtype)


# ---- launches

MAX_HEAD_DIM = 576
"""The width of the keys of latent attention (DeepSeek's), where all query heads share one KV head."""

MAX_OWN = 256
"""The most rows per tile. Half as many cost 3 to 5 % more, and a multiple would not fit the second-level cache. With
AMX tiles, the backward's additions to dq per tile weigh more: there, twice as many rows save a tenth."""

FEW = (0, 4, 4, 2, 1)
FEW_ON_ARM64 = (0, 2, 1)
"""The most rows per tile for which kernels/cpu/few.h runs a launch, by instruction set (notebook, 2026-11-22; on arm64
a guess)."""

ROOM = 2**18
"""The bytes that a job of such a launch holds."""

MOST_BY_BLOCK, LEAST_BLOCK, LEAST_LISTING = 8, 16, 48
"""Limits within which kernels/cpu/by_block.h runs a forward: the most rows per tile, the fewest keys per block, and the
fewest rows of one job that are expected to see the same block."""

MORE_BY_BLOCK = 6
"""A job of such a forward has this many times as many tiles as one of `few` rows: a third of that costs 0.14 more."""


def launches(
    problem: Problem, q: Tensor, side: Side, *, owned: bool = False, which: tuple[int, ...] | None = None,
    forward: bool = False,
) -> tuple[Launch, ...]:  # fmt: skip
    """Return the launches of a problem, from the cache.

    Args:
        owned: group tiles into jobs so that no row is read by two jobs of the same launch.
        which: compute only the groups of these launches, given as positions in what `tiles.launched` returns for side
            "keys", even if `side` is "queries". None: all groups.
        forward: they are those of the forward, which may run by block (`Launch`).
    """
    plan = problem.plan
    layouts = problem.layouts
    if not plan.groups or not q.numel() or which == ():
        return ()

    blocks = None
    if layouts is not None:
        blocks = tuple((n, *x.block_size, x.is_causal) for n, x in layouts.items())
    own = _own(side, q, plan)
    if side == "keys":
        vectors = 4
    else:
        vectors = 3 * q.shape[2] // max(1, plan.num_heads)
    together = max(1, ROOM // (4 * q.shape[-1] * vectors))

    few = 0
    joinable = 1
    by_block = False
    if problem.bias is None:  # only kernels/cpu/forward.h and backward.h add one, to the rows of one head
        few = PROCESSOR.most_few(q.dtype)
        if side == "queries" and layouts is not None:
            joinable = _sharing(q.shape[2], plan, layouts)
            by_block = forward and _fill_lanes(layouts, joinable, MORE_BY_BLOCK * together)
    if by_block:
        together *= MORE_BY_BLOCK

    def make() -> Launches:
        some = plan
        if which is not None:
            of_keys = tiles.launched(plan, "keys", layouts)
            groups = chain.from_iterable([of_keys[i] for i in which])
            some = replace(plan, groups=tuple(groups))
        made = []
        for cells in tiles.cells_of(some, side, layouts):
            lines = tiles.lines_of(cells.array, side, own)
            made.append(launch_of(lines, cells.listed, side, owned, few, together, joinable, own, by_block))
        return Launches(tuple(made))

    key = "cpu", plan, blocks, side, owned, own, few, together, which, joinable, by_block
    return plan_cache.get(key, make).launches


def _sharing(heads: int, plan: Plan, layouts: Layouts) -> int:
    """Return the number of query heads per KV head if they share their lists, else 1; `heads`: of all query heads."""
    group = heads // plan.num_heads
    if all(heads // layout.num_heads % group == 0 for layout in layouts.values()):
        return group
    return 1


def _fill_lanes(layouts: Layouts, joined: int, together: int) -> bool:
    """Return whether `together` tiles, with `joined` heads side by side, are expected to have enough rows that see the
    same block to fill the lanes: kernels/cpu/by_block.h then gathers the block once for all of them."""
    for layout in layouts.values():
        if layout.kinds is not None:
            return False
        rows = layout.q_block * joined
        lists = layout.batch_size * layout.num_heads * layout.query_blocks
        share = layout.nnz / max(1, lists * layout.key_blocks)  # of the tiles, which see a block
        listing = share * together * rows
        if rows > MOST_BY_BLOCK or layout.k_block < LEAST_BLOCK or listing < LEAST_LISTING:
            return False
    return True


def _own(side: Side, q: Tensor, plan: Plan) -> int:
    """Return the rows per tile: MAX_OWN, or 2 MAX_OWN for tiles of keys (`side`) with AMX. Halve this, once, if
    head_dim exceeds 128 or the rows would fill fewer than 32 tiles; halve it again if head_dim exceeds 256."""
    rows = plan.sizes.queries if side == "queries" else plan.sizes.keys
    most = MAX_OWN
    if side == "keys" and PROCESSOR.in_tiles(q.dtype):
        most = 2 * MAX_OWN
    if q.shape[-1] > 128 or rows * q.shape[0] < 32 * most:
        most //= 2
    if q.shape[-1] > 256:
        most //= 2
    return most


# ---- arguments

_POINTERS = (
    "q", "k", "v", "dout", "out", "lse", "dlse", "stats", "dq", "dk", "dv", "lines", "jobs", "indptr", "indices",
    "kinds", "bits", "hidden", "lengths", "query_words", "key_words", "bias", "bias_sums", "query_at", "key_at",
)  # fmt: skip
_INTEGERS = (
    "B", "N", "M", "H", "G", "D", "qsb", "qsn", "qsh", "ksb", "ksn", "ksh", "vsb", "vsn", "vsh", "dsb", "dsn", "dsh",
    "job_count", "spans", "own", "lsb", "lsh", "LH", "size", "row_bytes", "kwn", "kwh", "threshold", "add_dq",
    "add_dkdv", "few", "joined", "by_block", "threads", "bias_kind", "bias_batch", "bias_head", "bias_row", "bias_at",
    "column_of_key", "column_of_query", "first_column", "columns", "axes", "query_at_batch", "key_at_batch",
    "bias_shared",
)  # fmt: skip


class _Scores(ctypes.Structure):
    """Mirror the struct `Scores` of kernels/cpu/call.h."""

    _fields_ = [(name, ctypes.c_double) for name in Scores._fields]


class _Call(ctypes.Structure):
    """Mirror the struct `Call` of kernels/cpu/call.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _INTEGERS),
        ("keep_scale", ctypes.c_double),
        ("scores", _Scores),
    ]


def assert_same_fields(library: ctypes.CDLL) -> None:
    """Assert that `_Call` has the fields of the compiled `Call`, at the same places."""
    library.dilated_attention_call_fields.restype = ctypes.c_char_p
    places = [(name, getattr(_Call, name).offset) for name, *_ in _Call._fields_]
    expected = " ".join(f"{name} {offset}" for name, offset in [*places, ("size", ctypes.sizeof(_Call))])
    found = library.dilated_attention_call_fields().decode().strip()
    assert found == expected, f"kernels/cpu/call.h has the fields {found}; backends/cpu.py has {expected}"


# At import: torch.compile reads what `refusal` needs as constants.
_LIBRARY, PROCESSOR, _MISSING = _load()
# The function itself releases Python's lock, and takes it to let handlers of signals run. It raises what they raise.
_PROTOTYPE = ctypes.PYFUNCTYPE(*[ctypes.c_int64] * 4, ctypes.c_void_p)
_RUN = None if _LIBRARY is None else _PROTOTYPE(("dilated_attention_run", _LIBRARY))


class _Arguments:
    """Hold the arguments of a call of the library, and keep alive the tensors whose addresses it holds."""

    def __init__(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> None:
        batch, tokens, heads, head_dim = q.shape
        ratio = heads // k.shape[2] if k.shape[2] else 1
        sizes = problem.plan.sizes
        self.work = batch * head_dim * max(sizes.entries * ratio, READ * sizes.keys)
        self.layouts = problem.layouts
        self.type = TYPES[q.dtype]
        self.instructions = PROCESSOR.set_of(q.dtype)
        self.call = _Call(
            B=batch, N=tokens, M=k.shape[1], H=k.shape[2], G=ratio, D=head_dim,
            threads=torch.get_num_threads() if self.work > ONE_THREAD else 1, scores=_Scores(*problem.scores),
        )  # fmt: skip
        self.tensors: dict[str, Tensor] = {}
        hidden = problem.hidden
        if hidden is not None:
            hidden = hidden[..., 0].expand(batch, -1).contiguous()
        self.set(q=q, k=k, v=v, lengths=problem.lengths, hidden=hidden)
        self.bias: Entries | None = None
        if problem.bias is not None and q.numel() and k.numel():
            one_by_one = self.call.threads == 1 or len(problem.plan.groups) == 1
            self.bias = entries_of(problem.bias, problem.attributes, q, k, one_by_one)

        if problem.scores.dropout_p:
            words = problem.attributes.keys["words"]
            per_head = words.shape[2] > 1
            self.set(query_words=problem.attributes.queries["words"].contiguous(), key_words=words)
            self.set(kwn=words.stride(1), kwh=words.stride(2) if per_head else 0)
            self.set(threshold=dropout.threshold(problem.scores.dropout_p))
            self.call.keep_scale = dropout.factor(problem.scores.dropout_p)

    def set(self, **values: Tensor | int | None) -> None:
        """Set arguments by name; for q, k, v and dout also the strides."""
        for name, x in values.items():
            if isinstance(x, Tensor):
                if name in ("q", "k", "v", "dout"):
                    if x.stride(-1) != 1:
                        x = x.contiguous()
                    for axis, stride in zip("bnh", x.stride(), strict=False):
                        setattr(self.call, f"{name[0]}s{axis}", stride)
                self.tensors[name] = x
                x = x.data_ptr()
            setattr(self.call, name, x)

    def set_bias(self, side: Side) -> None:
        """Set the arguments of the bias, if there is one, for kernels whose tiles hold queries or keys."""
        if self.bias is not None:
            self.set(**self.bias.arguments(side))

    def launch(self, launch: Launch) -> None:
        """Set the arguments that a launch determines: its tiles, jobs and lists of blocks. The caller keeps them."""
        table = launch.table
        call = self.call
        call.lines = table.lines.data_ptr()
        call.spans = table.spans
        call.jobs = launch.jobs.data_ptr()
        call.job_count = len(launch.jobs) - 1
        call.own = launch.rows
        call.few = launch.few
        call.joined = launch.joined
        call.by_block = launch.by_block
        if self.layouts is None or table.count is None:
            return

        layout = self.layouts[table.count]
        lists: BlockLayout | Transposed
        if launch.side == "queries":
            lists = layout
            size = layout.k_block
        else:
            lists = layout.transposed
            size = layout.q_block
        lines = lists.indptr.shape[2]
        per_sample = layout.batch_size > 1
        self.set(
            indptr=lists.indptr, indices=lists.indices, size=size,
            lsb=layout.num_heads * lines if per_sample else 0, lsh=lines,
            LH=self.call.H * self.call.G // layout.num_heads,
        )  # fmt: skip
        if layout.kinds is None:
            self.set(kinds=None, bits=None)
        elif launch.side == "queries":
            self.set(kinds=layout.kinds, bits=layout.words_by_key, row_bytes=4 * -(-layout.q_block // 32))
        else:
            self.set(kinds=layout.transposed_kinds, bits=layout.words_by_query, row_bytes=4 * -(-layout.k_block // 32))


def run(kernel: str, arguments: _Arguments, launch: Launch) -> None:
    """Run a kernel over a launch's tiles, in one call of the library; MemoryError if its threads get no memory."""
    arguments.launch(launch)
    _run(kernel, arguments.type, arguments.instructions, arguments.call)


def _run(kernel: str, kind: int, instructions: int, call: _Call) -> None:
    assert _RUN is not None, "refusal() comes first"
    if _RUN(KERNELS[kernel], kind, instructions, ctypes.addressof(call)):
        raise MemoryError("the CPU kernels found no memory for their threads")
