"""Random calls made in unusual ways, against the oracle in float64: `python tests/explore_calls.py --count 1000`.

`test_properties` and `test_blocks` vary what a call asks. This varies how it is made:

- memory: each tensor expanded, overlapping itself, with strides of 0, an offset or gaps, negated in memory; one tensor
  as q, k and v;
- gradients: of some of q, k, v and sinks, from out, lse or both, by a dout of any strides, twice;
- samples: no batch, no tokens, empty samples, lengths and edges as lists or strided tensors, masks with strides of 0;
- state: default dtype and device, deterministic algorithms, number of threads, no_grad, inference_mode, checkpointing;
- transforms: vmap over any dimensions of some of the tensors, grad, vmap of grad;
- threads: several calls at once, on different backends.

A miss prints the seed of its call; `--seed N --count 1` runs that one again. `test_unusual_calls.py` runs a few.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import test_blocks
import test_properties
from conformance import magnitudes, survivors
from dilated_attention import Dilated, attention
from dilated_attention.backends import blocks, cpu, native
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.reference import attend, batch_counts
from dilated_attention.backends.table import BACKENDS
from dilated_attention.scores import Scores
from tolerances import excess

NAMES = ("q", "k", "v", "sinks")
MODES = (
    ["eager"] * 6 + ["vmap"] * 3 + ["vmap of grad"] * 2 + ["grad", "no_grad", "inference_mode", "checkpoint", "shared"]
)
MEMORY = ["dense", "permuted", "sliced", "expanded", "overlapping", "wide", "negated"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # then on the Triton backend alone


def memory(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random numbers of a shape, in memory that lies in one of the ways that PyTorch allows."""
    generator = torch.Generator("cpu").manual_seed(draw.getrandbits(40))

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64, device="cpu").to(dtype)

    kind = draw.choice(MEMORY)
    if kind == "permuted":
        order = draw.sample(range(len(shape)), len(shape))
        return normal(*(shape[dim] for dim in order)).permute([order.index(dim) for dim in range(len(shape))])
    if kind == "sliced":
        steps, before = ([draw.randint(low, high) for _ in shape] for low, high in ((1, 3), (0, 2)))
        x = normal(*(a + n * step for n, step, a in zip(shape, steps, before, strict=True)))
        return x[tuple(slice(a, a + n * step, step) for n, step, a in zip(shape, steps, before, strict=True))]
    if kind == "expanded":
        return normal(*(n if draw.random() < 0.6 else 1 for n in shape)).expand(shape)
    if kind in ("overlapping", "wide"):
        steps = [0, 1, 1, 2, 3, 5] if kind == "overlapping" else [7, 31, 64]
        strides = [draw.choice(steps) for _ in shape]
        offset = draw.randint(0, 3)
        size = offset + 1 + sum(max(n - 1, 0) * stride for n, stride in zip(shape, strides, strict=True))
        return normal(min(size, 1 << 20)).as_strided(shape, strides, offset) if size <= 1 << 20 else normal(*shape)
    if kind == "negated":  # in memory: as conjugation leaves an imaginary part
        return torch._neg_view(normal(*shape))
    return normal(*shape)


class Trial:
    """One call, all of it drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.seed, self.mode = seed, draw.choice(MODES)
        self.mapped = self.mode.startswith("vmap")
        self.call = self._layout() if draw.random() < 0.35 else self._dilated()
        call = self.call
        if self.mode == "shared":
            call = self.call = replace(call, group=1)
            if isinstance(call, test_blocks.Call):
                call = self.call = replace(call, own_lists=(False, False))
        self.dtype = draw.choice([torch.float32] * 3 + [torch.float64, torch.bfloat16, torch.float16])
        if INTERPRETED and self.dtype == torch.float64:
            self.dtype = torch.float32
        self.head_dim = draw.choice([1, 2, 3, 8, 16, 17, 20, 33])
        self.value_dim = self.head_dim if draw.random() < 0.8 or self.mode == "shared" else draw.choice([1, 5, 24])
        needs = {"a block layout": isinstance(call, test_blocks.Call), "dropout_p": call.dropout_p > 0}
        needs["key_padding_mask"] = call.padding is not None
        facts = Facts(
            torch.device("cpu"), self.dtype, max(self.head_dim, self.value_dim), call.seq_len,
            tuple(name for name, needed in needs.items() if needed),
        )  # fmt: skip
        served = [name for name, backend in BACKENDS.items() if backend.refusal(facts) is None]
        if INTERPRETED:
            served = ["triton"]
        else:
            served = [name for name in served if name != "triton"]
            served += [name for name in served if name != "reference"] * 2 + ["auto"]
        self.backend = draw.choice(served)
        self.gradient_of = call.gradient_of
        self.sinks = draw.choice([None, None, torch.float32, self.dtype])
        wanted = [name for name in NAMES[: 3 + (self.sinks is not None)] if draw.random() < 0.6]
        self.wanted = wanted or (["q"] if self.mode in ("grad", "vmap of grad", "checkpoint") else [])
        if self.gradient_of == ("lse",) and self.mode in ("grad", "vmap of grad", "checkpoint"):
            self.wanted = [name for name in self.wanted if name != "sinks"] or ["k"]
        self.state = {
            "dtype": draw.choice([None, None, torch.float64, torch.bfloat16, torch.float16]),
            "device": draw.choice([None, None, "cpu", "meta"]),
            "threads": draw.choice([1, 1, 2, 3]),
            "deterministic": draw.random() < 0.5,
            "one_thread": draw.choice([0, cpu.ONE_THREAD]),
            "tile_bytes": draw.choice([1, native._TILE_BYTES]),
            "chunk_bytes": draw.choice([20_000, blocks._CHUNK_BYTES]),
        }

    def __repr__(self) -> str:
        shown = {name: x for name, x in vars(self).items() if name not in ("draw", "seed")}
        return f"seed {self.seed}: {shown}"

    def _common(self) -> dict[str, Any]:
        draw, ragged = self.draw, {}
        batch, seq_len = draw.choice([0, 1, 1, 2, 2, 3]), draw.choice([0, 1, 2, *range(3, 41), *range(5, 41)])
        if draw.random() < 0.3:
            ragged["lengths"] = tuple(draw.choice([0, 0, seq_len, draw.randint(0, seq_len)]) for _ in range(batch))
        elif draw.random() < 0.4 and not self.mapped:
            batch = 1
            inner = sorted(draw.choice([0, seq_len, draw.randint(0, seq_len)]) for _ in range(draw.randint(0, 6)))
            ragged["cu_seqlens"] = (0, *inner, seq_len)
        if draw.random() < 0.3:
            ragged["padding"] = draw.choice([0.0, 0.3, 0.9, 1.0])
        return {
            **ragged,
            "batch": batch,
            "seq_len": seq_len,
            "kv_heads": draw.choice([1, 2, 3]),
            "group": draw.choice([1, 1, 2]),
            "is_causal": draw.random() < 0.5,
            "scale": draw.choice([None, None, 0.3, -0.4, 0.0]),
            "dropout_p": 0.0 if self.mapped else draw.choice([0.0] * 5 + [0.4]),
            "gradient_of": draw.choice([("out",), ("out", "lse"), ("lse",)]),
            "head_offset": draw.choice([0, 0, 1, 5]),
            "seed": draw.getrandbits(31),
        }

    def _dilated(self) -> test_properties.Call:
        draw, common = self.draw, self._common()
        branches = draw.choice([1, 2, 3])
        pairs = [(draw.randint(1, 48), draw.choice([1, 1, 2, 3, 4, 7])) for _ in range(branches)]
        compat = draw.random() < 0.15
        pattern = {
            "segment_lengths": tuple(max(w, r) for w, r in pairs),
            "dilation_rates": tuple(r for _, r in pairs),
            "offsets": "head",
            "head_groups": False,
        }
        if compat or draw.random() < 0.1:
            common["head_offset"] = None
            pattern["head_groups"] = not compat and branches <= common["kv_heads"]
        return test_properties.Call(
            **common, head_dim=8, pattern=pattern, compat="torchscale" if compat else None,
        )  # fmt: skip

    def _layout(self) -> test_blocks.Call:
        draw, common = self.draw, self._common()
        common["seq_len"] = max(common["seq_len"], 1)
        if "cu_seqlens" in common:
            common["cu_seqlens"] = (*common["cu_seqlens"][:-1], common["seq_len"])
        branches: tuple[tuple[int, int], ...] = ()
        if common["batch"] and draw.random() < 0.4:
            branches = tuple((draw.randint(3, 50), draw.choice([1, 2, 3])) for _ in range(draw.choice([1, 2])))
        own = (not self.mapped and common["batch"] > 0 and draw.random() < 0.3, draw.random() < 0.3)
        return test_blocks.Call(
            **common, builder=draw.choice(test_blocks.BUILDERS), block_size=draw.choice(test_blocks.BLOCK_SIZES),
            own_lists=own, branches=branches, causal_layout=draw.random() < 0.2,
        )  # fmt: skip

    def pattern(self, call: Any) -> Any:
        return call.pattern() if isinstance(call, test_blocks.Call) else Dilated(**call.pattern, compat=call.compat)

    def counts(self, call: Any) -> tuple[Tensor, Tensor | None]:
        if isinstance(call, test_blocks.Call):
            return call.counts(), None
        pattern, ragged = call.pattern, call.ragged()
        return batch_counts(
            call.batch, call.seq_len, pattern["segment_lengths"], pattern["dilation_rates"], call.table(),
            is_causal=call.is_causal, compat=call.compat, **ragged,
        )  # fmt: skip

    def ragged(self, call: Any) -> dict[str, Any]:
        """lengths, cu_seqlens and mask, as lists or in memory of any kind."""
        given = call.options() if isinstance(call, test_blocks.Call) else call.ragged()
        draw = random.Random(self.seed + 1)
        for name in ("lengths", "cu_seqlens"):
            if given[name] is None:
                continue
            form = draw.choice(["list", "int32", "strided", "given"])
            if form == "list":
                given[name] = given[name].tolist()
            elif form == "int32":
                given[name] = given[name].to(torch.int32)
            elif form == "strided":
                given[name] = torch.stack([given[name], given[name] + 1], 1)[:, 0]
        mask = given["key_padding_mask"]
        if mask is not None and draw.random() < 0.5:
            given["key_padding_mask"] = mask.T.contiguous().T
        return given

    def tensors(self, lead: dict[str, int | None], size: int) -> dict[str, Tensor]:
        """q, k, v and sinks; those with a place in `lead` have a dimension of this size there."""
        call, heads = self.call, self.call.kv_heads * self.call.group
        shapes: dict[str, tuple[int, ...]] = {
            "q": (call.batch, call.seq_len, heads, self.head_dim),
            "k": (call.batch, call.seq_len, call.kv_heads, self.head_dim),
            "v": (call.batch, call.seq_len, call.kv_heads, self.value_dim),
        }
        if self.sinks is not None:
            shapes["sinks"] = (heads,)
        made = {}
        for name, shape in shapes.items():
            at = lead.get(name)
            full = shape if at is None else (*shape[:at], size, *shape[at:])
            made[name] = memory(self.draw, full, self.dtype if name != "sinks" else self.sinks)
        if self.mode == "shared":
            made["k"] = made["v"] = made["q"]
        return made

    def cotangents(self, lead: tuple[int, ...] = ()) -> dict[str, Tensor]:
        call, heads = self.call, self.call.kv_heads * self.call.group
        shapes = {"out": (call.batch, call.seq_len, heads, self.value_dim), "lse": (call.batch, heads, call.seq_len)}
        dtypes = {"out": self.dtype, "lse": torch.promote_types(self.dtype, torch.float32)}
        return {name: memory(self.draw, (*lead, *shapes[name]), dtypes[name]) for name in self.gradient_of}

    def run(self, call: Any, tensors: dict[str, Tensor], ragged: dict[str, Any]) -> dict[str, Tensor]:
        if call.dropout_p:
            torch.manual_seed(call.seed)
        out, lse = attention(
            tensors["q"], tensors["k"], tensors["v"], self.made, is_causal=call.is_causal, scale=call.scale,
            dropout_p=call.dropout_p, sinks=tensors.get("sinks"), head_offset=call.head_offset, return_lse=True,
            backend=self.backend, **ragged,
        )  # fmt: skip
        return {"out": out, "lse": lse}

    def oracle(
        self, call: Any, tensors: dict[str, Tensor], cotangents: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The expected results and gradients, and the size of the terms that each is a sum of."""
        counts, phantoms = self.counts(call)
        doubles = {name: x.detach().double().clone().requires_grad_() for name, x in tensors.items()}
        q, k, v = (doubles[name] for name in NAMES[:3])
        scale = self.head_dim**-0.5 if call.scale is None else call.scale
        keep = survivors(q, k, call.dropout_p, call.head_offset or 0, call.seed)
        apart = max(1, counts.shape[-3] // k.shape[2])
        options = {"scale": scale, "phantoms": phantoms, "keep": keep, "dropout_p": call.dropout_p}
        scores = Scores(scale, dropout_p=call.dropout_p)

        def keys(x: Tensor) -> Tensor:
            return x.repeat_interleave(apart, 2)

        bare, lse = attend(q, keys(k), keys(v), counts, scores, phantoms=phantoms, keep=keep)
        lse = lse.transpose(1, 2)
        rest = torch.ones(())
        out = bare
        if "sinks" in doubles:
            above = torch.where(lse == -torch.inf, -torch.inf, lse - doubles["sinks"][:, None])
            rest = above.sigmoid().transpose(1, 2)[..., None]
            out = bare * rest
        results = {"out": out, "lse": lse}
        outputs = [results[name] for name in cotangents]
        weights = [x.double() for x in cotangents.values()]
        gradients = torch.autograd.grad(outputs, list(doubles.values()), weights, materialize_grads=True)
        expected = results | {f"d{name}": x for name, x in zip(doubles, gradients, strict=True)}

        with torch.no_grad():
            d_out = cotangents["out"].double() if "out" in cotangents else torch.zeros(out.shape, dtype=torch.float64)
            d_lse = cotangents["lse"].double() if "lse" in cotangents else torch.zeros(lse.shape, dtype=torch.float64)
            of_sinks = ((d_out * bare).abs().sum(-1, keepdim=True) * rest * (1 - rest)).squeeze(-1)
            sizes = magnitudes(
                q, keys(k), keys(v), counts, d_out * rest, d_lse.abs() + of_sinks.transpose(1, 2), **options
            )
            sizes |= {name: sizes[name].unflatten(2, (-1, apart)).sum(3) for name in ("dk", "dv")}
            if "sinks" in doubles:  # of the sum over d and i of dout out f (1 - f), f = sigmoid(lse - sink)
                above = 1 + torch.where(lse == -torch.inf, 0.0, sizes["lse"]) + doubles["sinks"].abs()[:, None]
                terms = (d_out.abs() * sizes["out"]).sum(-1) * (rest * (1 - rest)).squeeze(-1)
                sizes["dsinks"] = (terms * above.transpose(1, 2)).sum((0, 1))
        if self.mode == "shared":
            for every in (expected, sizes):
                every["dq"] = every["dk"] = every["dv"] = every["dq"] + every["dk"] + every["dv"]
        return expected, sizes

    @contextmanager
    def settings(self) -> Iterator[None]:
        """The state of PyTorch and of this library that the call runs in."""
        state, threads, dtype = self.state, torch.get_num_threads(), torch.get_default_dtype()
        deterministic = torch.are_deterministic_algorithms_enabled()
        with ExitStack() as stack:
            for module, name, value in (
                (cpu, "ONE_THREAD", state["one_thread"]),
                (native, "_TILE_BYTES", state["tile_bytes"]),
                (blocks, "_CHUNK_BYTES", state["chunk_bytes"]),
            ):
                stack.enter_context(mock.patch.object(module, name, value))
            torch.set_num_threads(state["threads"])
            torch.use_deterministic_algorithms(state["deterministic"])
            torch.set_default_dtype(state["dtype"] or dtype)
            try:
                yield
            finally:
                torch.set_num_threads(threads)
                torch.use_deterministic_algorithms(deterministic)
                torch.set_default_dtype(dtype)

    def device(self) -> Any:
        return nullcontext() if self.state["device"] is None else torch.device(self.state["device"])

    def errors(self) -> dict[str, float]:
        """The error of each result over its bar; raises where the call does."""
        self.counts(self.call)  # layouts are made here, before the state changes, and kept by `test_blocks.Call`
        self.made = self.pattern(self.call)
        return (self._mapped if self.mapped else self._eager)()

    def _judge(self, call: Any, tensors: Any, cotangents: Any, actual: dict[str, Tensor]) -> dict[str, float]:
        expected, sizes = self.oracle(call, tensors, cotangents)
        dtypes = {"out": self.dtype, "lse": torch.promote_types(self.dtype, torch.float32), "dsinks": self.sinks}
        for name, x in actual.items():
            assert x.dtype == dtypes.get(name, self.dtype), f"{name} is {x.dtype}"
            assert x.device.type == "cpu", f"{name} is on {x.device}"
        coarser = max(self.dtype, self.sinks or self.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return {
            name: excess(x, expected[name], sizes[name], coarser if name == "dsinks" else self.dtype)
            for name, x in actual.items()
        }

    def _eager(self) -> dict[str, float]:
        tensors, ragged = self.tensors({}, 1), self.ragged(self.call)
        cotangents = self.cotangents()
        leaves = {name: x.detach() for name, x in tensors.items()}
        if self.mode == "shared":
            leaves["k"] = leaves["v"] = leaves["q"]
        names = list(dict.fromkeys("q" if self.mode == "shared" and x != "sinks" else x for x in self.wanted))
        if self.mode == "inference_mode" and self.draw.random() < 0.5:
            with torch.inference_mode():
                leaves = {name: x.clone() if self.draw.random() < 0.5 else x for name, x in leaves.items()}
        elif self.mode != "grad":
            for name in names:
                leaves[name].requires_grad_()
        gradients: dict[str, Tensor] = {}
        with self.device():
            if self.mode in ("no_grad", "inference_mode"):
                with torch.no_grad() if self.mode == "no_grad" else torch.inference_mode():
                    results = self.run(self.call, leaves, ragged)
            elif self.mode == "grad":

                def loss(*given: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                    results = self.run(self.call, leaves | dict(zip(names, given, strict=True)), ragged)
                    return self._loss(results, cotangents), results

                found, results = torch.func.grad(loss, tuple(range(len(names))), has_aux=True)(
                    *(leaves[name] for name in names)
                )
                gradients = dict(zip(names, found, strict=True))
            else:
                if self.mode == "checkpoint":
                    run = lambda *_: tuple(self.run(self.call, leaves, ragged).values())  # noqa: E731
                    results = dict(
                        zip(("out", "lse"), checkpoint(run, *leaves.values(), use_reentrant=False), strict=True)
                    )
                else:
                    results = self.run(self.call, leaves, ragged)
                outputs = [name for name in cotangents if results[name].requires_grad]
                if outputs and names:
                    found = [
                        torch.autograd.grad(
                            [results[name] for name in outputs],
                            [leaves[name] for name in names],
                            [cotangents[name] for name in outputs],
                            retain_graph=True, materialize_grads=True,
                        )
                        for _ in range(2 if self.mode == "eager" else 1)
                    ]  # fmt: skip
                    for one, other in zip(found[0], found[-1], strict=True):
                        assert torch.equal(one, other), "a second backward of the same graph differs"
                    gradients = dict(zip(names, found[0], strict=True))
        actual = results | {f"d{name}": x for name, x in gradients.items()}
        with torch.inference_mode(False):
            actual = {name: x.detach().clone() for name, x in actual.items()}
        return self._judge(self.call, tensors, cotangents, actual)

    @staticmethod
    def _loss(results: dict[str, Tensor], cotangents: dict[str, Tensor]) -> Tensor:
        """Return a loss whose gradients by out and lse are the cotangents.

        A row that sees nothing has lse -inf and gradient 0.
        """
        lse = results["lse"]
        finite = results | {"lse": lse.masked_fill(lse == -torch.inf, 0.0)}
        terms = [(finite[name].double() * x.double()).sum() for name, x in cotangents.items()]
        return sum(terms[1:], terms[0])

    def _mapped(self) -> dict[str, float]:
        draw, call = self.draw, self.call
        size = draw.choice([1, 2, 3])
        lead = {name: draw.choice([None, 0, 0, 1, 2, 3, 4]) for name in NAMES[:3]}
        lead["sinks"] = draw.choice([None, 0, 1]) if self.sinks is not None else None
        if all(at is None for at in lead.values()):
            lead["q"] = 0
        tensors, ragged = self.tensors(lead, size), self.ragged(call)
        cotangents = self.cotangents((size,))
        calls = [call] * size
        lengths = None
        read = self.backend == "reference" or (isinstance(call, test_blocks.Call) and call.branches)  # refused then
        if call.lengths is not None and not read and draw.random() < 0.5:  # each element has lengths of its own
            calls = [
                replace(call, lengths=tuple(draw.randint(0, call.seq_len) for _ in call.lengths)) for _ in range(size)
            ]
            lengths = torch.tensor([x.lengths for x in calls], dtype=torch.int64, device="cpu").view(size, -1)
        mapped = [name for name in tensors if lead[name] is not None]
        inner = [name for name in self.wanted if name in tensors]

        def function(given: dict[str, Tensor], weights: dict[str, Tensor], own: Tensor | None) -> dict[str, Tensor]:
            every = {name: given.get(name, x) for name, x in tensors.items()}
            options = ragged if own is None else ragged | {"lengths": own}
            if self.mode == "vmap":
                return self.run(call, every, options)

            def loss(*leaves: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                results = self.run(call, every | dict(zip(inner, leaves, strict=True)), options)
                return self._loss(results, weights), results

            grad = torch.func.grad(loss, tuple(range(len(inner))), has_aux=True)
            found, results = grad(*(every[name] for name in inner))
            return results | {f"d{name}": x for name, x in zip(inner, found, strict=True)}

        in_dims = ({name: lead[name] for name in mapped}, dict.fromkeys(cotangents, 0), None if lengths is None else 0)
        chunk = draw.choice([None, None, 1])
        with self.device():
            actual = torch.func.vmap(function, in_dims, chunk_size=chunk)(
                {name: tensors[name] for name in mapped}, cotangents, lengths
            )
        worst: dict[str, float] = {}
        for i in range(size):
            one = {name: x if lead[name] is None else x.select(lead[name], i) for name, x in tensors.items()}
            weights = {name: x[i] for name, x in cotangents.items()}
            errors = self._judge(calls[i], one, weights, {name: x[i] for name, x in actual.items()})
            worst = {name: max(error, worst.get(name, 0.0)) for name, error in errors.items()}
        return worst


def misses(count: int, seed: int, report: Callable[[str], None] = print) -> int:
    """Count how many of `count` calls miss, each reported.

    Every tenth of them runs with the three after it in threads.
    """
    missed = 0
    numbers = iter(range(seed, seed + count))
    for number in numbers:
        trials = [Trial(number)]
        if number % 10 == 0 and count > 10:
            trials += [Trial(other) for other, _ in zip(numbers, range(3), strict=False)]
        together = len(trials) > 1 and not any(trial.call.dropout_p for trial in trials)  # seeds are the process' own
        with ExitStack() as stack:
            if together:
                stack.enter_context(trials[0].settings())
            found: dict[int, str | None] = {}

            def judge(trial: Trial, together: bool = together, found: dict[int, str | None] = found) -> None:
                try:
                    with nullcontext() if together else trial.settings():
                        errors = trial.errors()
                    found[trial.seed] = None if all(x <= 1 for x in errors.values()) else f"over their bars: {errors}"
                except Exception:
                    found[trial.seed] = traceback.format_exc()

            workers = [threading.Thread(target=judge, args=(trial,)) for trial in trials]
            for worker in workers:
                worker.start() if together else worker.run()
            for worker in workers if together else ():
                worker.join()
        for trial in trials:
            if found.get(trial.seed, "its thread ended") is not None:
                missed += 1
                report(f"{trial!r}{' in threads' * together}\n{found.get(trial.seed)}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    missed = misses(arguments.count, arguments.seed)
    print(f"{arguments.count} calls from seed {arguments.seed}: {missed} missed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
