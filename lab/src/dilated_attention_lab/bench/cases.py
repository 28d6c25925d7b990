"""Describe one call of one method at one shape as a frozen value, and make the work that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention import BlockLayout, Dilated, attention, block_sparse_attention, dilated_attention, plan_cache
from dilated_attention.nn import (
    BlockSparseRingMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
)
from dilated_attention.plumbing import Plan, plan_dilated
from dilated_attention_lab.bench.rivals import RIVALS, sdpa

Contender = Callable[[], Iterator[str]]
"""Work to be timed: each name that it yields is a phase, which ends there."""

Blocks = Literal["local", "global", "dilated", "random"]
Method = Literal[
    "dilated", "head groups", "ring", "multihead", "multihead block-sparse",
    "dense", "dense calls", "block-sparse", "block-sparse dilated", "flex", "gather", "mask", "torch.sparse",
]  # fmt: skip

MULTIHEAD = ("multihead", "multihead block-sparse")
DILATED = ("dilated", "head groups", "ring", *MULTIHEAD, "dense calls", "block-sparse dilated")
SPARSE = ("block-sparse", "block-sparse dilated", "multihead block-sparse", *RIVALS)


def contender(call: Callable[[], object]) -> Contender:
    """Return a contender, work to be timed, which runs `call` and yields the name of its only phase, `forward`."""

    def work() -> Iterator[str]:
        call()
        yield "forward"

    return work


def trained(
    call: Callable[..., Tensor],
    *inputs: Sequence[Tensor],
    parameters: Iterable[Tensor] = (),
    backward: bool = True,
    repeat: int = 1,
) -> Contender:
    """Return a contender that runs `call` on each of `inputs`: the phase `forward`, which does so `repeat` times, and,
    with `backward`, the phase `forward+backward`, which adds the gradients of inputs and parameters of the last time.
    """
    parameters = list(parameters)
    leaves = [[*(x.requires_grad_(backward) for x in some), *parameters] for some in inputs]
    gradients: list[Tensor] = []

    def work() -> Iterator[str]:
        with torch.set_grad_enabled(backward):
            for _ in range(repeat):
                outs = [call(*some) for some in inputs]
            yield "forward"
            if backward:
                if not gradients:  # in the first run, which warms up
                    gradients.extend([torch.randn_like(out) for out in outs])
                for out, some, gradient in zip(outs, leaves, gradients, strict=True):
                    torch.autograd.grad(out, some, gradient)
                yield "forward+backward"

    return work


def under(setting: Callable[[], AbstractContextManager[Any]], work: Contender) -> Contender:
    """Make a contender that runs `work` inside the context manager that `setting()` returns."""

    def limited() -> Iterator[str]:
        with setting():
            yield from work()

    return limited


def doubling(first: int, branches: int) -> Dilated:
    """Return a pattern of `branches` branches: segment lengths double from `first`, and rates from 1."""
    return Dilated(tuple(first << i for i in range(branches)), tuple(1 << i for i in range(branches)))


DOUBLING = doubling(2048, 20)
"""The pattern, over 2^30 tokens, for which the time to make a plan is stated."""


def planning(pattern: Dilated, heads: int, seq_len: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two calls to time: making a plan, and finding it in the cache."""
    branches = pattern.branches(heads)

    def find() -> object:
        return plan_dilated(*branches[:3], seq_len)

    def make() -> object:
        plan_cache.clear()
        return find()

    return make, find


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Describe one call.

    Attributes:
        method: `dilated`: `dilated_attention`; `dense`: `scaled_dot_product_attention` over the whole sequence; `dense
            calls`: the same score entries as the dilated pattern's, done by one call of that function per branch on
            contiguous (batch x segments, heads, w / r, head_dim): what dilated attention costs when rows are in the
            right place already and nothing is merged; `block-sparse`: `block_sparse_attention`; `block-sparse dilated`:
            the product of both patterns; `head groups`: `dilated_attention` with one branch per run of heads; `ring`:
            the module `RingDilatedAttention` without a mesh; `multihead`, `multihead block-sparse`: the modules with
            their projections, heads x head_dim wide; others: the block-sparse layout run in another way, see rivals.py.
        segment_lengths, dilation_rates, offsets: the dilated pattern, or the calls that stand for it.
        blocks, density, block_size: the layout: a builder of `BlockLayout` and the requested density; with
            `blocks="dilated"` a query block sees every second block, as far as the density allows.
        dtype: the name of a torch dtype, such as `float32`.
        backend: as in `dilated_attention`.
    """

    method: Method
    seq_len: int
    segment_lengths: tuple[int, ...] = ()
    dilation_rates: tuple[int, ...] = ()
    offsets: Literal["head", "head_block"] = "head"
    blocks: Blocks | None = None
    density: float | None = None
    block_size: int = 128
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    is_causal: bool = False
    dtype: str = "float32"
    backend: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "segment_lengths", tuple(self.segment_lengths))
        object.__setattr__(self, "dilation_rates", tuple(self.dilation_rates))
        for name in ("seq_len", "batch", "heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        if self.density is not None and not 0 < self.density <= 1:
            raise ValueError(f"density must lie in (0, 1]; got {self.density}")
        if self.method in DILATED:
            Dilated(self.segment_lengths, self.dilation_rates, self.offsets)
        if self.method in SPARSE and (self.blocks is None or self.density is None):
            raise ValueError(f"method={self.method!r} needs blocks and density; got {self.blocks} and {self.density}")

    @property
    def parameters(self) -> dict[str, Any]:
        """Return what a row of results records: the fields that the method reads."""
        unread = set() if self.method in DILATED else {"segment_lengths", "dilation_rates", "offsets"}
        unread |= set() if self.method in SPARSE else {"blocks", "density", "block_size"}
        unread |= {"backend"} if self.backend == "auto" else set()
        return {name: value for name, value in asdict(self).items() if name not in unread}

    @property
    def pattern(self) -> Dilated:
        """Return the dilated pattern without its blocks, or one segment of all tokens if the method has no branches."""
        if self.method in DILATED:
            groups = self.method == "head groups"
            return Dilated(self.segment_lengths, self.dilation_rates, self.offsets, head_groups=groups)
        return Dilated((self.seq_len,), (1,))

    @property
    def plan(self) -> Plan:
        return plan_dilated(*self.pattern.branches(self.heads)[:3], self.seq_len, is_causal=self.is_causal)

    def layout(self, seq_len: int) -> BlockLayout:
        assert self.density is not None
        options: dict[str, Any] = {"block_size": self.block_size, "is_causal": self.is_causal}
        if self.blocks == "random":
            return BlockLayout.random(seq_len, self.density, 0, **options)
        if self.blocks == "dilated":
            return BlockLayout.dilated(seq_len, (2,), density=self.density, **options)
        builder = BlockLayout.local if self.blocks == "local" else BlockLayout.global_
        return builder(seq_len, density=self.density, **options)

    @property
    def out_bytes(self) -> int:
        """Return the bytes of the output. Each of q, k and v has the same size."""
        return self.batch * self.seq_len * self.heads * self.head_dim * getattr(torch, self.dtype).itemsize

    @property
    def flops(self) -> int:
        """Return the useful floating-point operations of a forward: attention's and, for the multihead methods, the
        projections'. The backward of attention adds 2.5 times as many as its forward."""
        width = self.heads * self.head_dim
        projections = 8 * self.batch * self.seq_len * width**2 if self.method in MULTIHEAD else 0
        return projections + self.attention_flops

    @property
    def attention_flops(self) -> int:
        """Return the operations of the two matrix products of attention: 4 head_dim per score entry."""
        if self.method not in SPARSE:
            return self.batch * self.pattern.flops(self.seq_len, self.heads, self.head_dim, self.is_causal)
        groups = self.plan.groups
        return self.batch * sum(x.heads * x.queries.segments * self._layout_flops(x.queries.count) for x in groups)

    def _layout_flops(self, seq_len: int) -> int:
        """Return the attention operations of one head under the layout of `seq_len` tokens.

        All blocks count as full, and a block that the diagonal cuts as half.
        """
        layout = self.layout(seq_len)
        entries = (layout.nnz - int(layout.masked.sum()) / 2) * layout.q_block * layout.k_block
        return int(4 * self.head_dim * entries)

    def predicted_bytes(self, *, backward: bool) -> int:
        """Return an upper estimate of what the call will hold at its peak, inputs included.

        It counts in tensors of the output's size: q, k, v, out, and one for temporaries. With a backward also dout, dq,
        dk, dv and two more for temporaries; in half precision three more, for gradients in single precision. `mask`,
        `torch.sparse` and `gather` add their masks, matrices or copies of keys.
        """
        outputs = 11 if backward else 5
        if backward and self.dtype in ("float16", "bfloat16"):
            outputs += 3
        if self.method == "dense calls":
            rows = sum(1 / rate for rate in self.dilation_rates)
            outputs = int(outputs * rows) + 1
        pairs = int((self.density or 1) * self.seq_len**2)
        tables = {"mask": 5 * self.seq_len**2, "torch.sparse": self.seq_len**2 + 56 * pairs}.get(self.method, 0)
        if self.method == "gather":
            outputs += int(2 * (self.density or 1) * self.seq_len / self.block_size) + 1
        return outputs * self.out_bytes + tables

    def inputs(self, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return random (q, k, v) of each fused call: one in all, except for `dense calls`. These make one per branch,
        and one more per branch with a shorter last segment."""
        if self.method != "dense calls":
            shapes = [(self.batch, self.seq_len, self.heads, self.head_dim)]
        else:
            shapes = [
                (self.batch * segments, self.heads, -(-length // rate), self.head_dim)
                for segment, rate in zip(self.segment_lengths, self.dilation_rates, strict=True)
                for segments, length in (
                    (self.seq_len // min(segment, self.seq_len), min(segment, self.seq_len)),
                    (1, self.seq_len % min(segment, self.seq_len)),
                )
                if segments * length
            ]
        options: dict[str, Any] = {"dtype": getattr(torch, self.dtype), "device": device}
        return [tuple(torch.randn(shape, **options) for _ in range(3)) for shape in shapes]  # type: ignore[misc]

    def _layouts(self) -> Callable[[int], BlockLayout]:
        """Make the layouts inside branches now, because a compiled call cannot.

        Return a function that looks one up by the number of tokens of a dilated subsequence.
        """
        made = {count: self.layout(count) for count in {group.queries.count for group in self.plan.groups}}
        return lambda count: made[count]

    def prepare(self, device: torch.device | str = "cpu") -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return the call, with its layouts and modules made: a function from q, k and v to out."""
        options: dict[str, Any] = {"is_causal": self.is_causal, "backend": self.backend}
        if self.method == "block-sparse":
            layout = self.layout(self.seq_len)
            return lambda q, k, v: block_sparse_attention(q, k, v, layout, **options)  # type: ignore[return-value]
        if self.method == "block-sparse dilated":
            product = self.pattern * self._layouts()
            return lambda q, k, v: attention(q, k, v, product, **options)  # type: ignore[return-value]
        if self.method == "ring":
            ring = RingDilatedAttention(self.segment_lengths, self.dilation_rates, offsets=self.offsets)
            return lambda q, k, v: ring(q, k, v, is_causal=self.is_causal)
        if self.method in MULTIHEAD:
            module = self.module().to(device)

            def projected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                out, _ = module(q.flatten(2), k.flatten(2), v.flatten(2), is_causal=self.is_causal)
                return out.unflatten(2, (self.heads, self.head_dim))

            return projected
        if self.method in RIVALS:
            return RIVALS[self.method](self.layout(self.seq_len))
        return self._call

    def module(self) -> MultiheadDilatedAttention | BlockSparseRingMultiheadDilatedAttention:
        """Return the multihead module. Its weights are drawn with a fixed seed and not trained."""
        width, options = self.heads * self.head_dim, {"dtype": getattr(torch, self.dtype)}
        branches: dict[str, Any] = {"segment_lengths": self.segment_lengths, "dilation_rates": self.dilation_rates}
        kind: Any = MultiheadDilatedAttention
        if self.method == "multihead block-sparse":
            kind, branches = BlockSparseRingMultiheadDilatedAttention, {**branches, "layout": self._layouts()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = kind(width, self.heads, **branches, offsets=self.offsets, **options)
        return made.requires_grad_(False)

    def _call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.method in ("dilated", "head groups"):
            options: dict[str, Any] = {"offsets": self.offsets, "is_causal": self.is_causal, "backend": self.backend}
            options["head_groups"] = self.method == "head groups"
            return dilated_attention(q, k, v, self.segment_lengths, self.dilation_rates, **options)  # type: ignore[return-value]
        if self.method == "dense":
            return sdpa(q, k, v, is_causal=self.is_causal)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)

    def contender(self, device: torch.device, *, backward: bool = False, repeat: int = 1) -> Contender:
        """Return the work: the phase `forward`, which runs `repeat` forwards, and with `backward` the phase
        `forward+backward`, which adds the backward of the last of them."""
        work = trained(self.prepare(device), *self.inputs(device), backward=backward, repeat=repeat)
        if self.method == "flex":
            list(work())  # compiles
        return work
