"""`bench windows`: sliding windows against PyTorch's dense and masked calls, prompts in chunks, and one new token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilated_attention import Dilated, Window, attention
from dilated_attention.plumbing import cpu
from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import Contender, contender, trained
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.rivals import flex_with_mask, sdpa
from dilated_attention_lab.bench.suites import Step, over

HEADS = 4
TRAINED_WITH_AVX2 = 1.1
"""The bar of a causal window's forward and backward where products run in AVX2."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Inputs = Callable[[int], tuple[Tensor, Tensor, Tensor]]
"""A function from a number of tokens to random q, k and v."""


def steps(device: torch.device, quick: bool) -> list[Step]:
    dtypes = (torch.float32, torch.bfloat16)
    seq_len, budget = (4096, 3.0) if quick else (16384, 15.0)
    shapes = [(512, 64)] if quick else [(512, 64), (512, 128), (4096, 64)]
    found = []
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for keys, head_dim in shapes:
            inputs = partial(_inputs, device, dtype, head_dim)
            run = partial(_over_dense, Window(keys - 1), True, seq_len, inputs, 0.75, budget)
            found.append(Step(f"window of {keys:,} keys, {name}, head_dim {head_dim}", run))
        inputs = partial(_inputs, device, dtype, 64)
        run = partial(_over_dense, Window(64), False, seq_len // 2, inputs, 1.2, budget / 2)
        found.append(Step(f"window of 64 keys to each side, {name}", run))
    inputs, window = partial(_inputs, device, torch.float32, 64), Window(511)
    longest, prompt = (seq_len, seq_len) if quick else (131072, 65536)
    return [
        *found,
        Step("window of 512 keys over the masked call", partial(_over_mask, window, seq_len, inputs, budget)),
        Step("window of 512 keys over FlexAttention", partial(_over_flex, window, seq_len, inputs, budget)),
        Step(f"memory of {longest:,} tokens", partial(_memory, window, longest, inputs)),
        Step(f"a prompt of {prompt:,} tokens in chunks", partial(_in_chunks, prompt, inputs, budget)),
        Step("one new token", partial(_one_token, inputs, budget / 2)),
    ]


def _inputs(device: torch.device, dtype: torch.dtype, head_dim: int, seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, seq_len, HEADS, head_dim, device=device, dtype=dtype) for _ in range(3))
    return q, k, v


def _parameters(q: Tensor, **more: Any) -> dict[str, Any]:
    dtype = str(q.dtype).removeprefix("torch.")
    return {"seq_len": q.shape[1], "heads": HEADS, "head_dim": q.shape[3], "dtype": dtype, **more}


def windowed(window: Window, is_causal: bool, backend: str = "auto") -> Attend:
    """Return a function of q, k and v that calls `attention` with a window."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v, window, is_causal=is_causal, backend=backend)
        assert isinstance(out, Tensor)
        return out

    return attend


def _over_dense(
    window: Window, is_causal: bool, seq_len: int, inputs: Inputs, bar: float, budget: float
) -> Iterator[Row]:
    """Compare a window's time per score entry with PyTorch's dense call over the same tokens."""
    q, k, v = inputs(seq_len)
    contenders = {
        "window": trained(windowed(window, is_causal), (q, k, v)),
        "dense": trained(partial(sdpa, is_causal=is_causal), (q, k, v)),
    }
    rounds = measure.interleave(contenders, seconds=budget, device=q.device, dtype=q.dtype)
    entries = window.flops(seq_len, 1, 1, is_causal) / Dilated((seq_len,), (1,)).flops(seq_len, 1, 1, is_causal)
    parameters = _parameters(q, before=window.before, after=window.after, is_causal=is_causal)
    with_avx2 = is_causal and cpu.PROCESSOR.highest < cpu.AVX512
    bars = {"forward": bar, "forward+backward": TRAINED_WITH_AVX2 if with_avx2 else bar}
    for phase, limit in bars.items():
        spread = rounds.ratio("window", "dense", phase, factor=1 / entries)
        times = {name: rounds.spread(name, phase) for name in contenders}
        yield Row.of(f"{phase}: time per entry over the dense call's", parameters, spread, times=times, bar=limit)


def _over_mask(window: Window, seq_len: int, inputs: Inputs, budget: float) -> Iterator[Row]:
    q, k, v = inputs(seq_len)
    distance = torch.arange(seq_len) - torch.arange(seq_len)[:, None]
    mask = ((distance <= 0) & (distance >= -window.before)).to(q.device)
    contenders = {
        "window": trained(windowed(window, True), (q, k, v)),
        "mask": trained(partial(sdpa, attn_mask=mask), (q, k, v)),
    }
    rounds = measure.interleave(contenders, seconds=budget, device=q.device)
    parameters = _parameters(q, before=window.before, after=0, is_causal=True)
    for phase in ("forward", "forward+backward"):
        title = f"{phase}: time over scaled_dot_product_attention with the window's mask"
        yield over(rounds, "window", "mask", phase, parameters, title, bar=0.04)


def _over_flex(window: Window, seq_len: int, inputs: Inputs, budget: float) -> Iterator[Row]:
    """Compare the time of a window with compiled FlexAttention, which skips blocks that the window hides."""

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key <= window.before)

    q, k, v = inputs(seq_len)
    contenders = {
        "window": contender(lambda: windowed(window, True)(q, k, v)),
        "flex": contender(flex_with_mask(seen, q, k, v)),
    }
    with torch.no_grad():
        rounds = measure.interleave(contenders, seconds=budget, device=q.device)
    parameters = _parameters(q, before=window.before, after=0, is_causal=True)
    title = "forward: time over compiled FlexAttention"
    yield over(rounds, "window", "flex", "forward", parameters, title, bar=0.5)


def _memory(window: Window, seq_len: int, inputs: Inputs) -> Iterator[Row]:
    """Measure the peak memory of a forward above q, k, v and out, where the system gives it."""
    q, k, v = inputs(seq_len)
    attend = windowed(window, True)
    attend(*(x[:, :4096] for x in (q, k, v)))  # loads the operators and starts the threads
    with torch.no_grad():
        peak = measure.peak_above_now(partial(attend, q, k, v), q.device)
    parameters = _parameters(q, before=window.before, after=0, is_causal=True)
    if peak is not None:
        share = max(0, peak - q.nbytes) / q.nbytes
        yield Row("forward: peak memory above q, k, v and out, over out", parameters, share, "x", bar=0.1)


def _in_chunks(seq_len: int, inputs: Inputs, budget: float) -> Iterator[Row]:
    (q, k, v), window, chunk = inputs(seq_len), Window(1023), 4096
    whole = partial(attention, q, k, v, window, is_causal=True)

    def chunks() -> None:
        for start in range(0, seq_len, chunk):
            stop = start + chunk
            attention(q[:, start:stop], k[:, :stop], v[:, :stop], window, is_causal=True, q_start=start)

    rounds = measure.interleave(
        {"chunks": contender(chunks), "whole": contender(whole)}, seconds=budget, device=q.device
    )
    parameters = _parameters(q, before=window.before, after=0, chunk=chunk, is_causal=True)
    yield over(rounds, "chunks", "whole", "forward", parameters, "a prompt in chunks: time over one call", bar=1.1)


def _one_token(inputs: Inputs, budget: float) -> Iterator[Row]:
    (q, k, v), window = inputs(100_001), Window(1023)

    def token(position: int) -> Contender:
        row = slice(position, position + 1)
        call = partial(attention, q[:, row], k[:, : position + 1], v[:, : position + 1], window, is_causal=True)
        return contender(lambda: [call(q_start=position) for _ in range(100)])

    def visible() -> None:
        for _ in range(100):
            sdpa(q[:, -1:], k[:, -1024:], v[:, -1024:])

    contenders = {"at 100,000": token(100_000), "at 5,000": token(5_000), "visible keys": contender(visible)}
    with torch.no_grad():
        rounds = measure.interleave(contenders, seconds=budget, device=q.device)
    parameters = _parameters(q, before=window.before, after=0, is_causal=True)
    for other, bar in (("at 5,000", 1.05), ("visible keys", 1.0)):
        title = f"one new token at 100,000: time over {other}"
        yield over(rounds, "at 100,000", other, "forward", parameters, title, bar=bar)
