"""Run calls on GPUs with Triton: a plan is a few kernel launches, each over a device table of tiles (tiles.py).

Where an earlier launch wrote a row, a kernel continues its running state. So nothing is gathered, padded or kept per
branch. Tables are made once per plan, kernel and device. A later call only launches, without a host synchronisation,
and may be captured in a CUDA graph.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends import dropout, tiles
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.problem import MOST_PREPARED, Layouts, Problem, Repeat
from dilated_attention.backends.triton_bias import Biased, biased
from dilated_attention.bias import DISTANCES, FORMS
from dilated_attention.cache import plan_cache
from dilated_attention.kernels.configurations import ARCHITECTURES, FUSED, Kernel, Shape, side_of
from dilated_attention.merge import running
from dilated_attention.torch_internals import constant_when_traced, on_default_stream

Tensors = Mapping[str, Any]
"""The tensors of a call by their names in the kernel; None for a tensor that the call does not have."""

LEAST_BOXED = 512  # programs of a launch from which kernels/hopper.py pays for the host's work on its descriptors
MOST_BOUND = 64  # the most `Bound` launches kept per kernel and table
WIDE_FROM = 2**31
"""The number of elements over which a streamed tile may extend before its offsets need 64 bits."""


@dataclass(frozen=True)
class Rule:
    """Say when `auto` chooses this backend on a GPU.

    Attributes:
        asks: what a call needs beyond q, k, v and causality, as in `Facts.needs`; "" for nothing.
        native: what the native backend does on a GPU for such a call; ends the message of `on_request`.
        least: by architecture, the least score entries times head_dim at which this backend is faster. None: choose it
            at any size, since native cannot compete.
    """

    asks: str
    native: str
    least: Mapping[str, int] | None = None


RULES = (
    Rule("bias", "multiplies in chunks, and forms the bias of their pairs"),
    Rule("a block layout", "gathers keys in hundreds of calls: of 10 % random blocks of 128, 32,768 tokens, 16 heads of"
         " 128, 540 calls and 6.7 GB"),
    Rule("dropout_p", "multiplies in hundreds of chunks"),
    Rule("key_padding_mask", "multiplies in hundreds of chunks"),
    Rule("softcap", "multiplies in hundreds of chunks"),
    Rule("a window", "multiplies in chunks of 256 queries with a bias"),
    Rule("", "makes a call a branch and merges", least={"sm_90": 44_040_192}),
)  # fmt: skip
"""The rules for choosing this backend. The first rule whose `asks` is something that the call needs applies."""

RIGHT: Mapping[str, tuple[str, ...]] = {"sm_90": ("bias",)}
"""The architectures on which every row of `bench gpu --part 1` in results/ was right, and what calls may need that no
row had, as `Rule.asks` names it.

Part 3 of such a file gives the values of `least` above: on an H200 those of a call of 256 tokens.
"""


def refusal(facts: Facts) -> str | None:
    """Return why this backend cannot serve a call, and what would serve it; None if it can."""
    why = _refusal_of(facts.device)
    if why is not None:
        return why
    if "bias" in facts.needs and facts.over_mesh:
        return "the kernels add no bias to rows that other ranks sent; native does"
    return tiles.refusal(facts)


@constant_when_traced
def _refusal_of(device: torch.device) -> str | None:
    """Return why this backend cannot serve a device; None if it can. torch.compile calls it without tracing it."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install triton"
    if device.type == "cpu":
        import triton

        if not triton.knobs.runtime.interpret:  # TRITON_INTERPRET=1 runs kernels on CPU tensors: for tests
            return "Triton needs a GPU"
    if device.type not in ("cpu", "cuda"):
        return f"Triton serves CUDA and ROCm devices, not {device.type}"
    if device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has compute capability below 8.0"
    return None


def on_request(facts: Facts) -> str | None:
    """Return why `auto` does not choose this backend for a call that it could serve; None if `auto` may."""
    if facts.device.type != "cuda":
        return "only on request; a GPU is what it is for"
    here = architecture(facts.device)
    (rule, *_) = [rule for rule in RULES if not rule.asks or rule.asks in facts.needs]
    unshown = rule.asks in RIGHT.get(here, ())
    if unshown or here not in RIGHT:
        such = f" with a {rule.asks}" if unshown else ""
        how = "`dilated-attention info --check` tells in a minute; then ask for it by name"
        return f"not shown right on {here} yet{such}: {how}. For this call native {rule.native}"
    if rule.least is None:
        return None
    least = rule.least.get(here)
    if least is None:
        return f"not measured against native on {here} yet; only on request"
    if facts.work < least:
        return f"native is faster below {least:.3g} score entries times head_dim"
    return None


@constant_when_traced
def architecture(device: torch.device) -> str:
    """Return the key in ARCHITECTURES (kernels/configurations.py) of the tile shapes that a device uses."""
    return _architecture(device)


@cache
def _architecture(device: torch.device) -> str:
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    name = f"sm_{major}{minor}"
    if name in ARCHITECTURES:
        return name
    if major == 10:
        return "sm_100"
    return "sm_86"


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, state: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return out, in q's dtype, and lse, float32, of a problem. Arguments and results are as in `native.forward`."""
    if state is None:
        state = running(q, problem.plan.covered)
    out, lse = state
    tensors = {"Q": _dense_rows(q), "K": _dense_rows(k), "V": _dense_rows(v), "OUT": out, "LSE": lse}
    with _on(q):
        _launches("forward", problem, q)(problem, tensors)
    return out, lse


def prepare(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Repeat, int] | None:
    """Return a function that repeats `forward` on tensors like these, with dense rows and no dropout, and the bytes of
    the device tables that it keeps; None if these exceed `MOST_PREPARED`. With a mask it repeats nothing."""
    launches = _launches("forward", problem, q)
    if launches.nbytes > MOST_PREPARED:
        return None

    precision = _precision(q.dtype)
    covered = problem.plan.covered
    single = q.dtype == torch.float32
    bound: list[tuple[Bound, tuple[Tensor | None, ...]]] = []
    in_lists = {group.at for group in problem.plan.groups if group.tokens}
    keys = k.shape[1]

    def repeat(
        q: Tensor, k: Tensor, v: Tensor, starts: tuple[int, int], hidden: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        if hidden is not None or (in_lists and (in_lists != {starts} or k.shape[1] != keys)):
            return None
        if (q.is_cuda and not on_default_stream(q)) or (single and _precision(q.dtype) != precision):
            return forward(problem, q, k, v)
        out, lse = running(q, covered)
        with _on(q):
            if not bound:
                found = launches.bind(problem, {"Q": q, "K": k, "V": v, "OUT": out, "LSE": lse})
                bound[:] = [(launch, tensors[5:]) for launch, tensors in found]  # at once: another thread may, too
            for launch, rest in bound:
                launch((q, k, v, out, lse, *rest))
        return out, lse

    return repeat, launches.nbytes


def backward(
    problem: Problem, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk, dv of a problem from the merged out and lse; `state`: running float32 sums to add to in place."""
    keys = _launches("dkdv", problem, q)
    queries = _launches("dq", problem, q)
    add_dkdv = state is not None or len(keys.launches) > 1
    add_dq = state is not None or len(queries.launches) > 1
    dout = _dense_rows(dout)
    tensors = {"Q": _dense_rows(q), "K": _dense_rows(k), "V": _dense_rows(v), "DOUT": dout}
    if state is not None:
        dq, dk, dv = state
    else:
        every_query = problem.plan.covered
        every_key = every_query and problem.plan.square
        dq = tiles.gradient(q, add_dq, every_query)
        dk = tiles.gradient(k, add_dkdv, every_key)
        dv = tiles.gradient(v, add_dkdv, every_key)

    with _on(q):
        tensors["STATS"] = _stats(out, lse, dout, dlse, held=keys.bound)
        keys(problem, tensors | {"DK": dk, "DV": dv}, add_dkdv)
        sums = None if problem.bias is None else problem.bias.sums
        queries(problem, tensors | {"DQ": dq, "SUMS": sums}, add_dq)
    if state is not None:
        return state
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# ---- launches


def run(kernel: Any, programs: int, **arguments: Any) -> Any:
    """Launch a kernel with `programs` programs and return the compiled kernel. Apart from filling buffers, this backend
    does nothing on a device except through `run` and what it returns."""
    return kernel[(programs,)](**arguments)


@dataclass(slots=True)
class Bound:
    """Hold a launch with every argument fixed except the tensors, which must be of one kind.

    Attributes:
        names: the names of the tensors in the kernel; settled: the fixed arguments by name.
        compiled: the compiled kernel; arguments: all arguments in order, with gaps for the tensors at `places`. The
            first launch sets these.
    """

    kernel: Any
    programs: int
    names: tuple[str, ...]
    settled: dict[str, Any]
    compiled: Any = None
    arguments: list[Any] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        if self.compiled is not None:
            arguments = self.arguments.copy()
            for place, x in zip(self.places, tensors, strict=True):
                arguments[place] = x
            self.compiled[(self.programs, 1, 1)](*arguments)
            return
        compiled = run(self.kernel, self.programs, **dict(zip(self.names, tensors, strict=True)), **self.settled)
        if compiled is not None:  # Triton's interpreter compiles nothing
            names = self.kernel.arg_names
            self.arguments = [self.settled.get(name) for name in names]
            self.places = [names.index(name) for name in self.names]
            self.compiled = compiled


@dataclass(slots=True)
class Boxed(Bound):
    """Hold a launch of kernels/hopper.py, which reads q, k and v through descriptors that `describe` makes by name."""

    describe: Any = None

    @classmethod
    def of(
        cls,
        hopper: Any,
        table: tiles.Described,
        programs: int,
        settled: dict[str, Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Boxed:
        describe = hopper.boxes(table, q, k, v)
        names = *describe(q, k, v), "OUT", "LSE", "INDPTR", "INDICES"
        numbers = {name: x for name, x in settled.items() if name in hopper.forward.arg_names}
        return cls(hopper.forward, programs, names, numbers | hopper.constants(table), describe=describe)

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        q, k, v, out, lse, *_, indptr, indices, _, _ = tensors
        Bound.__call__(self, (*self.describe(q, k, v).values(), out, lse, indptr, indices))


def _hopper(device: torch.device) -> Any:
    """Return kernels/hopper.py, where the device and Triton can run it; otherwise None."""
    if architecture(device) != "sm_90":
        return None
    try:
        from dilated_attention.kernels import hopper
    except ImportError:  # Triton has no Gluon, or an older one
        return None
    return hopper


def _bound(
    held: dict[tuple[Any, ...], tuple[Bound, ...]],
    tensors: Sequence[Tensor | None],
    also: tuple[Any, ...],
    settle: Callable[[], tuple[Bound, ...]],
) -> tuple[Bound, ...]:
    """Return the launches for these tensors from `held`, of bounded size, or make them with `settle` and add them.
    Their key is the strides and alignment of each tensor, and `also`: everything else that they depend on, such as
    shapes and dtypes."""
    addresses = [x.data_ptr() for x in tensors if x is not None]
    aligned: bool | tuple[bool, ...] = True
    if any(x % 16 for x in addresses):
        aligned = tuple([x % 16 == 0 for x in addresses])
    seen = (*also, aligned, *[None if x is None else x.stride() for x in tensors])
    bound = held.get(seen)
    if bound is None:
        if len(held) == MOST_BOUND:
            held.clear()
        bound = held[seen] = settle()
    return bound


@dataclass(frozen=True, slots=True)
class Launch:
    """Hold one kernel launch: its tiles and their shape."""

    kernel: Kernel
    table: tiles.Described
    shape: Shape

    def lists(self, layouts: Layouts | None) -> tuple[Tensor | None, ...]:
        """Return the lists that the kernel reads of its layout: key blocks by query block or, for dk and dv, query
        blocks by key block.

        They are indptr, indices, bits and split, as kernels/block_lists.py says; the last two are None if all blocks
        are whole, and all four without a layout.
        """
        if layouts is None or self.table.count is None:
            return None, None, None, None
        layout = layouts[self.table.count]
        if side_of(self.kernel) == "queries":
            if layout.kinds is None:
                return layout.indptr, layout.indices, None, None
            indices, split = layout.whole_first
            return layout.indptr, indices, layout.words_by_key, split
        if layout.kinds is None:
            return *layout.transposed, None, None
        indices, split = layout.transposed_whole_last
        return layout.transposed.indptr, indices, layout.words_by_query, split

    def bind(self, problem: Problem, tensors: Tensors, bias: Biased, chain: bool | None) -> Bound:
        """Return the launch for tensors like these, by their names in the kernel; `chain` as in `_Launches`."""
        from dilated_attention.kernels import strided

        function = {"forward": strided.forward, "dq": strided.backward_dq}.get(self.kernel, strided.backward_dkdv)
        q = tensors["Q"]
        k = tensors["K"]
        v = tensors["V"]
        programs = len(self.table.lines) * q.shape[0]
        if side_of(self.kernel) == "queries":
            programs *= q.shape[2] // k.shape[2]
        settled = _numbers(tensors, problem) | bias.others | self._of_lists(problem.layouts, tensors["INDPTR"], q)

        hopper = None
        plain = self.kernel == "forward" and not problem.scores.needs and tensors["HIDDEN"] is None
        if plain and programs >= LEAST_BOXED:
            hopper = _hopper(q.device)
        if hopper is not None and hopper.fits(self.table, self.shape, q, k, v):
            return Boxed.of(hopper, self.table, programs, settled, q, k, v)

        if chain is None:
            chain = self.table.chain
        settled |= self._constants(tensors["HIDDEN"] is not None, chain, settled)
        return Bound(function, programs, tuple(tensors), settled)

    def _constants(self, hides: bool, chain: bool, numbers: dict[str, Any]) -> dict[str, Any]:
        """Return the kernel's compile-time arguments. `hides`: keys may be hidden. `chain`: results continue earlier
        ones. `numbers`: holds the strides."""
        shape = self.shape
        table = self.table
        edge = table.edge
        if side_of(self.kernel) == "queries":
            row = max(numbers["UNIT"] * numbers["ksn"], numbers["UNIT"] * numbers["vsn"], numbers["wsn"])  # in elements
            sizes = {"BM": shape.own, "BN": shape.loop, "WIDE": table.reach * row >= WIDE_FROM}
            if hides:
                edge = -1
        else:
            sizes = {"BM": shape.loop, "BN": shape.own, "EVEN": table.even}
        return sizes | {
            "TILES": table.lines, "CAUSAL": table.is_causal, "WINDOW": table.banded, "SPANS": table.spans,
            "EDGE": edge, "CHAIN": chain, **shape.options(architecture(table.lines.device)),
        }  # fmt: skip

    def _of_lists(self, layouts: Layouts | None, indptr: Tensor | None, q: Tensor) -> dict[str, int]:
        """Return the kernel's arguments about block lists: strides of `indptr`, query heads per list, tokens per block,
        words per row of a mask. Without a layout, the values have no effect."""
        if layouts is None or self.table.count is None or indptr is None:
            return {"lsb": 0, "lsh": 0, "LH": 1, "SIZE": 1, "WORDS": 1}

        layout = layouts[self.table.count]
        own, size = layout.q_block, layout.k_block
        if side_of(self.kernel) == "keys":
            own, size = size, own
        batch, heads, lines = indptr.shape
        per_sample = heads * lines if batch > 1 else 0
        return {"lsb": per_sample, "lsh": lines, "LH": q.shape[2] // heads, "SIZE": size, "WORDS": -(-own // 32)}


@dataclass(frozen=True, slots=True)
class _Launches:
    """Hold a plan's launches of a kernel in the cache. `bound`: what `_bound` holds; for dk and dv also the launches of
    `backward_stats`."""

    launches: tuple[Launch, ...]
    bound: dict[tuple[Any, ...], tuple[Bound, ...]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(launch.table.lines.nbytes + 256 for launch in self.launches)

    def __call__(self, problem: Problem, tensors: Tensors, chain: bool | None = None) -> None:
        """Run the kernel over the tiles of each launch, in order; results go into the output tensors."""
        for bound, x in self.bind(problem, tensors, chain):
            bound(x)

    def bind(
        self, problem: Problem, tensors: Tensors, chain: bool | None = None
    ) -> list[tuple[Bound, tuple[Tensor | None, ...]]]:
        """Return each launch, in order, with its tensors, in the order of its names.

        Args:
            problem: gives the scores, the attributes and the layouts, from which the lists of blocks are taken.
            tensors: the kernel's other tensors by their names in the kernel, inputs and outputs.
            chain: backward: whether to add to the float32 gradients that the outputs hold, instead of writing them.
                None, for a forward: whether some tile continues the out and lse that an earlier launch wrote.
        """
        q = tensors["Q"]
        k = tensors["K"]
        hidden = problem.hidden
        if hidden is not None:
            hidden = hidden[..., 0].expand(len(q), -1).contiguous().view(torch.uint8)
        words = problem.attributes.queries.get("words")
        if words is not None:
            words = words.contiguous()
        bias = biased(problem)
        whole = (*tensors.values(), hidden, words, problem.attributes.keys.get("words"), *bias.tensors.values())
        each = [(*whole, *launch.lists(problem.layouts)) for launch in self.launches]

        def settle() -> tuple[Bound, ...]:
            names = *tensors, "HIDDEN", "WQ", "WK", *bias.tensors, "INDPTR", "INDICES", "BITS", "SPLIT"
            named = [dict(zip(names, x, strict=True)) for x in each]
            return tuple(launch.bind(problem, x, bias, chain) for launch, x in zip(self.launches, named, strict=True))

        lists: list[Tensor | None] = []
        shapes: list[torch.Size] = []
        for *_, indptr, indices, bits, split in each:
            if indptr is not None:
                lists += [indptr, indices, bits, split]
                shapes.append(indptr.shape)
        also = (problem.scores, chain, q.dtype, _precision(q.dtype), WIDE_FROM, q.shape, k.shape, bias.kind, *shapes)
        bound = _bound(self.bound, (*whole, *lists), also, settle)
        return [*zip(bound, each, strict=True)]


def _launches(kernel: Kernel, problem: Problem, q: Tensor) -> _Launches:
    plan = problem.plan
    layouts = problem.layouts
    masked = bool(problem.scores.needs) or problem.hidden is not None
    if not plan.groups or not q.numel():
        return _Launches(())

    blocks = None
    has_bits = False
    if layouts is not None:
        has_bits = any(x.kinds is not None for x in layouts.values())
        masked |= has_bits
        blocks = tuple((n, *x.block_size, x.is_causal, x.kinds is None) for n, x in layouts.items())
    shape = ARCHITECTURES[architecture(q.device)].shape(
        kernel,
        q.element_size(),
        q.shape[-1],
        masked,
        has_lists=layouts is not None,
        banded=plan.banded,
        has_bits=has_bits,
        has_bias=problem.bias is not None,
        has_entries=problem.bias is not None and FORMS[problem.bias.form] not in DISTANCES,
    )

    def make() -> _Launches:
        side = side_of(kernel)
        cut = shape.cut(*tiles.longest(plan, side, layouts))
        tables = tiles.tables(plan, side, cut, layouts, q.device)
        return _Launches(tuple(Launch(kernel, table, cut) for table in tables))

    key = "triton", plan, blocks, kernel, shape, q.device
    held = plan_cache.get(key, make)
    if q.is_cuda and not on_default_stream(q):
        stream = torch.cuda.current_stream(q.device)
        # The tables were allocated on the default stream. Without this, the allocator could reuse their memory, once
        # nothing refers to them, before this stream has read it. This is allowed during a capture too.
        for launch in held.launches:
            for table in (launch.table.lines, *launch.lists(layouts)):
                if table is not None:
                    table.record_stream(stream)
    return held


# ---- arguments


def _stats(
    out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *, held: dict[tuple[Any, ...], tuple[Bound, ...]]
) -> Tensor:
    """Return lse · log2(e) and rowsum(dout · out) - dlse for kernels: float32 (B, N, H, 2). `held`: see `_bound`."""
    out = out.contiguous()
    lse = lse.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    stats = torch.empty((*lse.shape, 2), dtype=torch.float32, device=lse.device)
    tensors = out, lse, dout, dlse, stats

    def settle() -> tuple[Bound, ...]:
        from dilated_attention.kernels import online

        _, tokens, heads, head_dim = out.shape
        unit, (strides,) = _strides(dout)
        rows = 32
        settled = {
            "size": lse.numel(), "N": tokens, "H": heads, "sb": strides[0], "sn": strides[1], "sh": strides[2],
            "UNIT": unit, "D": head_dim, "DP": _padded(head_dim), "BM": rows, **FUSED,
        }  # fmt: skip
        names = "OUT", "LSE", "DOUT", "DLSE", "STATS"
        return (Bound(online.backward_stats, -(-lse.numel() // rows), names, settled),)

    if lse.numel():
        _bound(held, tensors, ("stats", out.dtype, out.shape), settle)[0](tensors)
    return stats


def _numbers(tensors: Tensors, problem: Problem) -> dict[str, Any]:
    """Return the non-tensor arguments of a kernel that no table determines, by their names in kernels/strided.py.
    `tensors` holds Q, K, V and, for a backward, DOUT."""
    q = tensors["Q"]
    k = tensors["K"]
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]

    named = {"q": q, "k": k, "v": tensors["V"]}
    if "DOUT" in tensors:
        named["d"] = tensors["DOUT"]
    unit, strides = _strides(*named.values())
    steps = {}
    for name, (of_sample, of_token, of_head) in zip(named, strides, strict=True):
        steps[f"{name}sb"] = of_sample
        steps[f"{name}sn"] = of_token
        steps[f"{name}sh"] = of_head

    cap = problem.scores.softcap
    dropout_p = problem.scores.dropout_p
    of_words = {"threshold": 0, "keep_scale": 1.0, "wsn": 0, "wsh": 0}
    if dropout_p:
        words = problem.attributes.keys["words"]
        of_words["threshold"] = dropout.threshold(dropout_p)
        of_words["keep_scale"] = dropout.factor(dropout_p)
        of_words["wsn"] = words.stride(1)
        of_words["wsh"] = words.stride(2) if words.shape[2] > 1 else 0

    bounded = None
    if cap:
        # Beyond these bounds, the cap or a score divided by it would be 0 or infinite in single precision.
        bounded = max(2.0**-100, min(cap, 2.0**100))
    return steps | of_words | {
        "scale": problem.scores.scale, "softcap": bounded, "B": batch, "N": tokens, "M": k.shape[1], "H": kv_heads,
        "G": heads // kv_heads, "UNIT": unit, "D": head_dim, "DP": _padded(head_dim), "PRECISION": _precision(q.dtype),
    }  # fmt: skip


def _dense_rows(x: Tensor) -> Tensor:
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, list[list[int]]]:
    """Return a unit, the greatest common divisor of the strides and 16, and the strides of sample, token and head of
    each tensor in this unit."""
    unit = 16
    strides: list[list[int]] = []
    for x in tensors:
        of_tensor = [x.stride(i) if x.shape[i] > 1 else 0 for i in range(3)]
        unit = math.gcd(unit, *of_tensor)
        strides.append(of_tensor)

    in_units: list[list[int]] = []
    for of_tensor in strides:
        in_units.append([stride // unit for stride in of_tensor])
    return unit, in_units


def _padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def _precision(dtype: torch.dtype) -> str:
    """Return the precision of float32 products: tf32 only if PyTorch's own switch allows it in matrix products. ROCm's
    Triton has tf32 on some devices only."""
    if dtype != torch.float32 or torch.version.hip:
        return "ieee"
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        allowed = matmul.fp32_precision == "tf32"
    else:
        allowed = matmul.allow_tf32
    return "tf32" if allowed else "ieee"


def _on(q: Tensor) -> Any:
    if not q.is_cuda or q.get_device() == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(q.device)


_NOTHING = nullcontext()
