"""Random calls over what other tests do not vary: `python tests/explore_calls.py 10000 [seed]`.

Views that overlap, are expanded or begin in the middle of memory; any subset of gradients, a gradient of lse alone;
empty samples; head offsets; other default dtypes and devices; inference mode; vmap; threads; numbers of threads.
Each call is compared with the reference backend in double precision.
"""

from __future__ import annotations

import random
import sys
import threading
from contextlib import nullcontext

import torch

from dilated_attention import BlockLayout, Dilated, attention
from dilated_attention.backends import cpu
from tolerances import TOLERANCE

BACKENDS = ["native", "auto", *(["cpu"] if cpu.missing() is None else [])]


def view(draw, shape, dtype):
    """A tensor of this shape, as one of many kinds of views."""
    batch, seq, heads, dim = shape
    kind = draw.choice(
        ("dense", "transposed", "expanded batch", "expanded heads", "windows", "sliced", "steps", "tail")
    )
    if kind == "transposed":
        return torch.randn(batch, heads, seq, dim, dtype=dtype).transpose(1, 2)
    if kind == "expanded batch":
        return torch.randn(1, seq, heads, dim, dtype=dtype).expand(shape)
    if kind == "expanded heads":
        return torch.randn(batch, seq, 1, dim, dtype=dtype).expand(shape)
    if kind == "windows":  # token i + 1 begins one element after token i
        memory = torch.randn(batch * (seq + heads * dim), dtype=dtype)
        return memory.as_strided(shape, (seq + heads * dim if batch > 1 else 0, 1, dim, 1))
    if kind == "sliced":
        return torch.randn(batch, seq + 3, heads + 1, dim + 2, dtype=dtype)[:, 2 : 2 + seq, 1:, 1 : dim + 1]
    if kind == "steps":
        return torch.randn(batch, 2 * seq, heads, 2 * dim, dtype=dtype)[:, ::2, :, ::2]
    if kind == "tail":
        return torch.randn(3 + batch * seq * heads * dim, dtype=dtype)[3:].view(shape)
    return torch.randn(shape, dtype=dtype)


def one(seed: int) -> None:
    """Make one random call and compare it; AssertionError names the seed and what differs."""
    draw = random.Random(seed)
    generator = torch.manual_seed(seed)
    del generator
    dtype = draw.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16))
    batch, seq = draw.choice((0, 1, 1, 2, 3)), draw.choice((0, 1, 2, 7, 33, 64, 100))
    kv_heads, ratio, dim = draw.randint(1, 4), draw.choice((1, 1, 2, 3)), draw.choice((1, 3, 8, 16, 24))
    heads = kv_heads * ratio
    backend = draw.choice(BACKENDS if dtype != torch.float64 else ["native", "auto"])
    pattern: Dilated | BlockLayout
    if draw.random() < 0.25 and seq:
        block = draw.choice((4, 16))
        pattern = BlockLayout.random(seq, draw.choice((0.2, 0.7)), seed, block)
    else:
        rates = sorted(draw.choice((1, 2, 3, 5)) for _ in range(draw.randint(1, 3)))
        segments = sorted(max(rate, draw.choice((4, 9, 16, 50, 200))) for rate in rates)
        pattern = Dilated(segments, rates)
    is_causal = draw.random() < 0.5
    options: dict[str, object] = {"is_causal": is_causal, "scale": draw.choice((None, 0.3, -0.2, 0.0))}
    if isinstance(pattern, Dilated):
        if draw.random() < 0.3:
            options["head_offset"] = draw.randint(0, 7)
        if draw.random() < 0.3:
            options["lengths"] = [draw.choice((0, seq, draw.randint(0, seq))) for _ in range(batch)]
        elif batch == 1 and draw.random() < 0.4:
            cuts = sorted(draw.randint(0, seq) for _ in range(draw.randint(0, 3)))
            options["cu_seqlens"] = [0, *cuts, *cuts[-1:], seq]
    if draw.random() < 0.3:
        options["key_padding_mask"] = torch.rand(batch, seq, device="cpu") < 0.3
    q, k, v = (view(draw, (batch, seq, n, dim), dtype) for n in (heads, kv_heads, kv_heads))
    if draw.random() < 0.2 and heads == kv_heads:
        k = q  # one tensor twice
    if draw.random() < 0.3:
        options["sinks"] = torch.randn(heads, dtype=torch.promote_types(dtype, torch.float32))
    wants = [name for name in "qkvs" if draw.random() < 0.6]
    of = draw.choice((("out",), ("lse",), ("out", "lse")))
    mode = draw.choice(("plain", "plain", "inference", "no_grad", "vmap", "thread"))
    defaults = draw.choice((torch.float32, torch.float64, torch.bfloat16))
    threads = draw.choice((1, 2, 3))

    def run(precision, backend, mode):
        tensors = {"q": q, "k": k, "v": v, "s": options.get("sinks")}
        leaves = {}
        for name, x in tensors.items():
            if x is None:
                continue
            x = x.detach() if precision is None else x.detach().to(precision)
            leaves[name] = x.requires_grad_(name in wants and mode not in ("inference", "no_grad"))
        more = {**options, **({"sinks": leaves["s"]} if "s" in leaves else {})}

        def call(q, k, v):
            return attention(q, k, v, pattern, return_lse=True, backend=backend, **more)

        three = leaves["q"], leaves["k"], leaves["v"]
        with torch.inference_mode() if mode == "inference" else torch.no_grad() if mode == "no_grad" else nullcontext():
            mapped = mode == "vmap" and "cu_seqlens" not in more and "lengths" not in more and "s" not in leaves
            if mapped and "key_padding_mask" not in more:
                out, lse = (x[0] for x in torch.func.vmap(call)(*(x.unsqueeze(0) for x in three)))
            else:
                out, lse = call(*three)
        results = {"out": out, "lse": lse}
        outputs = [results[name] for name in of if results[name].requires_grad]
        if outputs:
            wanted = {name: x for name, x in leaves.items() if x.requires_grad}
            torch.manual_seed(seed)
            weights = [torch.randn(x.shape, dtype=torch.float32).to(x.dtype) for x in outputs]
            weights = [w.masked_fill(~x.detach().isfinite(), 0.0) for w, x in zip(weights, outputs, strict=True)]
            found = torch.autograd.grad(outputs, list(wanted.values()), weights, allow_unused=True)
            results |= {f"d{name}": g for name, g in zip(wanted, found, strict=True) if g is not None}
        return {name: x.detach().double() for name, x in results.items()}

    before = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(defaults)
    torch.set_num_threads(threads)
    try:
        found: dict[str, torch.Tensor] = {}
        if mode == "thread":
            workers = [threading.Thread(target=lambda: found.update(run(None, backend, mode))) for _ in range(2)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        else:
            found = run(None, backend, mode)
    finally:
        torch.set_default_dtype(before[0])
        torch.set_num_threads(before[1])
    right = run(torch.float64, "reference", "plain" if mode in ("vmap", "thread") else mode)
    assert found.keys() >= {name for name, x in right.items() if x.any()}, (seed, sorted(found), sorted(right))
    for name, x in found.items():
        y = right.get(name, torch.zeros_like(x))
        same = (x == y) | (x.isfinite() & y.isfinite())
        assert same.all(), (seed, name, "infinite or NaN in one of both")
        finite = x.isfinite() & y.isfinite()
        if finite.any():
            error = (x - y)[finite].norm() / max(y[finite].norm().item(), float(finite.sum()) ** 0.5 * 0.1)
            assert error <= TOLERANCE[dtype], (seed, name, float(error), dtype, backend, mode)


if __name__ == "__main__":
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    misses = []
    for seed in range(first, first + int(sys.argv[1])):
        try:
            one(seed)
        except Exception as error:
            misses.append(seed)
            print(f"{seed}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"{sys.argv[1]} calls from seed {first}: {len(misses)} misses")
    sys.exit(bool(misses))
