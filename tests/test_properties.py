"""Random calls of dilated patterns over every option, on the native and the reference backend, against the oracle in
float64 on the same inputs. `test_blocks` has those of layouts and products, `test_kernels` and `test_flash` run some of
both on their backends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from conformance import excesses, random_calls, survivors
from dilated_attention import Dilated, dilated_attention
from dilated_attention.backends import native
from dilated_attention.backends.reference import batch_counts

LAYOUTS = ("contiguous", "heads_first", "packed", "sliced", "head_dim_strided", "shared_batch")
FULL_PRECISION = st.sampled_from([torch.float64, torch.float32])
HALF_PRECISION = st.sampled_from([torch.bfloat16, torch.float16])

# Not st.integers, which draws its lower bound so often that a third of the calls would hold no token or one.
BATCHES = st.sampled_from([1, 2, 1, 3, 2, 0])
LENGTHS = st.sampled_from(range(1, 41))
SEGMENTS = st.sampled_from(range(1, 49))
SCALES = st.sampled_from([None, 0.3, 1.0, -0.4, 0.0, 2.5, -1.0])
DROPOUT = st.sampled_from([0.0, 0.0, 0.0, 0.0, 0.0, 0.4])
RATES = st.sampled_from([1, 2, 3, 1, 2, 4, 5, 6, 7, 9])


@dataclass(frozen=True)
class Call:
    """The arguments of one call, but for the tensors' numbers, which `seed` gives.

    `pattern` holds the arguments of `Dilated`, which is not made while hypothesis draws: what checks its annotations
    takes numbers from `random`. `tile_bytes` makes the native backend cut small groups as it cuts huge ones.
    """

    batch: int
    seq_len: int
    kv_heads: int
    group: int
    head_dim: int
    pattern: dict[str, Any]
    compat: str | None = None
    is_causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    head_offset: int | None = None
    lengths: tuple[int, ...] | None = None
    cu_seqlens: tuple[int, ...] | None = None
    padding: float | None = None
    layout: str = "contiguous"
    tile_bytes: int = native._TILE_BYTES
    gradient_of: tuple[str, ...] = ("out", "lse")
    seed: int = 0

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(self.seed)
        return tuple(
            arrange(self.layout, (self.batch, self.seq_len, heads, self.head_dim), generator, dtype)
            for heads in (self.kv_heads * self.group, self.kv_heads, self.kv_heads)
        )

    def ragged(self) -> dict[str, Tensor | None]:
        mask = None
        if self.padding is not None:
            generator = torch.Generator().manual_seed(self.seed + 1)
            mask = torch.rand(self.batch, self.seq_len, generator=generator) < self.padding
        return {
            "lengths": None if self.lengths is None else torch.tensor(self.lengths, dtype=torch.int64),
            "cu_seqlens": None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens, dtype=torch.int32),
            "key_padding_mask": mask,
        }

    def table(self) -> tuple[tuple[int, ...], ...]:
        by_block = self.compat == "torchscale" and self.pattern["offsets"] == "head"
        return Dilated(**self.pattern | ({"offsets": "head_block"} if by_block else {})).offset_table(
            self.kv_heads, self.head_offset
        )


def arrange(layout: str, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Random numbers of this shape, in memory as `layout` says."""
    batch, seq_len, heads, head_dim = shape
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    match layout:
        case "contiguous":
            return normal(shape).to(dtype)
        case "heads_first":
            return normal(batch, heads, seq_len, head_dim).to(dtype).transpose(1, 2)
        case "packed":
            return normal(batch, seq_len, 3, heads, head_dim).to(dtype).select(2, 1)
        case "sliced":
            return normal(batch, seq_len + 3, heads + 1, head_dim + 2).to(dtype)[:, 2:-1, 1:, :-2]
        case "head_dim_strided":
            return normal(batch, seq_len, head_dim, heads).to(dtype).transpose(2, 3)
        case "shared_batch":
            return normal(1, seq_len, heads, head_dim).to(dtype).expand(shape)
    raise AssertionError(layout)


@st.composite
def patterns(draw, kv_heads: int, groups: bool, head_offset: int | None) -> dict[str, Any]:
    branches = draw(st.sampled_from([1, 2, 3, 4]))
    segments = tuple(draw(st.lists(SEGMENTS, min_size=branches, max_size=branches)))
    rates = tuple(draw(st.lists(RATES, min_size=branches, max_size=branches)))
    offsets: Any = draw(st.sampled_from(["head", "head_block" if head_offset is None else "head", "table"]))
    if groups and branches <= kv_heads:
        offsets = "head"
        assume(all(i % r < w for i, (w, r) in enumerate(zip(segments, rates, strict=True))))
    else:
        groups = False
    heads = (head_offset or 0) + kv_heads
    if offsets == "table":
        rows = [st.lists(st.sampled_from([*range(r), -1]), min_size=heads, max_size=heads) for r in rates]
        offsets = tuple(tuple(draw(row)) for row in rows)
        assume(all(any(0 <= o < w for o in row) for w, row in zip(segments, offsets, strict=True)))
    return {"segment_lengths": segments, "dilation_rates": rates, "offsets": offsets, "head_groups": groups}


@st.composite
def calls(draw, ragged: bool = False, compat: bool = False) -> Call:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 5, 6]))
    groups = not compat and draw(st.sampled_from([False, False, False, True]))
    head_offset = None if compat or groups else draw(st.sampled_from([None, 0, 1, 5]))
    pattern = draw(patterns(kv_heads, groups, head_offset))
    batch, seq_len = draw(BATCHES), draw(LENGTHS)
    lengths = cu_seqlens = padding = None
    kind = draw(st.sampled_from(["lengths", "cu_seqlens", "mask", "lengths+mask", "cu_seqlens+mask"])) if ragged else ""
    if "lengths" in kind:
        lengths = tuple(draw(st.lists(st.sampled_from(range(seq_len, -1, -1)), min_size=batch, max_size=batch)))
    if "cu_seqlens" in kind:
        batch = 1
        cu_seqlens = (0, *sorted(draw(st.lists(st.sampled_from(range(seq_len + 1)), max_size=5))), seq_len)
    if "mask" in kind:
        padding = draw(st.sampled_from([0.1, 0.5, 0.9, 0.0, 1.0]))
    return Call(
        batch=batch,
        seq_len=seq_len,
        kv_heads=kv_heads,
        group=draw(st.sampled_from([1, 2, 3])),
        head_dim=draw(st.sampled_from([2, 1, 3, 8, 16, 20])),
        pattern=pattern,
        compat="torchscale" if compat else None,
        is_causal=draw(st.booleans()),
        scale=draw(SCALES),
        dropout_p=draw(DROPOUT),
        head_offset=head_offset,
        lengths=lengths,
        cu_seqlens=cu_seqlens,
        padding=padding,
        layout=draw(st.sampled_from(LAYOUTS)),
        tile_bytes=draw(st.sampled_from([native._TILE_BYTES, 1])),
        gradient_of=draw(st.sampled_from([("out",), ("out", "lse"), ("lse",)])),
        seed=draw(st.integers(0, 2**31)),
    )


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small calls are faster on one; and `torch.empty` is filled with NaN, so that what is read was written."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def check(call: Call, dtype: torch.dtype, backend: str = "native") -> None:
    q, k, v = call.inputs(dtype)
    ragged = call.ragged()
    counts, phantoms = batch_counts(
        call.batch,
        call.seq_len,
        call.pattern["segment_lengths"],
        call.pattern["dilation_rates"],
        call.table(),
        is_causal=call.is_causal,
        compat=call.compat,
        **ragged,
    )

    def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(call.seed)
        return dilated_attention(
            *inputs, **call.pattern, compat=call.compat, is_causal=call.is_causal, scale=call.scale,
            dropout_p=call.dropout_p, head_offset=call.head_offset, return_lse=True, backend=backend, **ragged,
        )  # fmt: skip

    scale = call.head_dim**-0.5 if call.scale is None else call.scale
    with mock.patch.object(native, "_TILE_BYTES", call.tile_bytes):
        errors = excesses(
            run,
            (q, k, v),
            counts,
            scale=scale,
            phantoms=phantoms,
            keep=survivors(q, k, call.dropout_p, call.head_offset or 0, call.seed),
            dropout_p=call.dropout_p,
            gradient_of=call.gradient_of,
            seed=call.seed,
        )
    assert all(error <= 1 for error in errors.values()), f"errors over their bars: {errors}"


@random_calls(100)
@given(call=calls())
def test_float64(call):
    check(call, torch.float64)


@random_calls(100)
@given(call=calls())
def test_float32(call):
    check(call, torch.float32)


@random_calls(110)
@given(call=calls(ragged=True), dtype=FULL_PRECISION)
def test_ragged(call, dtype):
    check(call, dtype)


@random_calls(60)
@given(call=calls(compat=True), dtype=FULL_PRECISION)
def test_torchscale(call, dtype):
    check(call, dtype)


@random_calls(80)
@given(call=calls(ragged=True, compat=True), dtype=FULL_PRECISION)
def test_torchscale_ragged(call, dtype):
    check(call, dtype)


@random_calls(80)
@given(call=st.one_of(calls(), calls(ragged=True), calls(compat=True)), dtype=HALF_PRECISION)
def test_half_precision(call, dtype):
    check(call, dtype)


@random_calls(60)
@given(
    call=st.one_of(calls(), calls(ragged=True), calls(compat=True)),
    dtype=FULL_PRECISION,
)
def test_reference_backend(call, dtype):
    check(call, dtype, "reference")
