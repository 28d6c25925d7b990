"""The cache of plans: its counters, its limit, its behaviour under threads and CUDA graphs."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance import in_sixteen_threads
from dilated_attention import BlockLayout, Dilated, attention, execution, plan_cache
from dilated_attention.backends import blocks, native, tiles
from dilated_attention.cache import Named, PlanCache, lasting
from dilated_attention.plan import plan_dilated


@dataclass(frozen=True)
class Entry:
    nbytes: int


class TestCache:
    def test_counters_and_order_of_eviction(self):
        cache = PlanCache(max_bytes=30)
        for key in "abc":
            assert cache.get(key, lambda: Entry(10)) == Entry(10)
        assert cache.info() == (0, 3, 0, 3, 30, 30)
        first = cache.get("a", lambda: pytest.fail("made again"))
        cache.get("d", lambda: Entry(10))  # "b" is the one used longest ago
        assert cache.get("a", lambda: pytest.fail("evicted")) is first
        cache.get("c", lambda: pytest.fail("evicted"))
        assert cache.info() == (3, 4, 1, 3, 30, 30)
        cache.get("b", lambda: Entry(10))
        assert cache.info().misses == 5

    def test_an_entry_larger_than_the_cache_is_returned_and_not_kept(self):
        cache = PlanCache(max_bytes=30)
        assert cache.get("large", lambda: Entry(31)) == Entry(31)
        assert cache.info()[3:5] == (0, 0)

    def test_an_entry_larger_than_the_cache_evicts_no_other(self):
        cache = PlanCache(max_bytes=30)
        cache.get("small", lambda: Entry(10))
        cache.get("large", lambda: Entry(31))
        cache.get("small", lambda: pytest.fail("evicted"))

    def test_what_a_cuda_graph_reads_outlives_its_eviction(self, monkeypatch):
        cache = PlanCache(max_bytes=30)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        alive = []
        for is_capturing in (False, True):
            monkeypatch.setattr(
                torch.cuda, "is_current_stream_capturing", lambda is_capturing=is_capturing: is_capturing
            )
            cache.get("a", lambda: Entry(10))  # made, as before a capture, then found
            alive.append(weakref.ref(cache.get("a", lambda: Entry(10))))
            cache.clear()
        gc.collect()
        assert [entry() is not None for entry in alive] == [False, True]
        assert cache.info().entries == 0

    def test_resize_and_clear(self):
        cache = PlanCache(max_bytes=100)
        for key in range(10):
            cache.get(key, lambda: Entry(10))
        cache.resize(35)
        assert cache.info() == (0, 10, 7, 3, 30, 35)
        cache.get(9, lambda: pytest.fail("evicted"))
        cache.clear()
        assert cache.info() == (0, 0, 0, 0, 0, 35)
        cache.resize(0)
        cache.get(1, lambda: Entry(1))
        assert cache.info().entries == 0

    @pytest.mark.parametrize("size", [-1, 1.5, True, "64"])
    def test_resize_refuses(self, size):
        with pytest.raises(ValueError, match="max_bytes must be a non-negative integer"):
            PlanCache(1).resize(size)

    def test_a_failing_make_leaves_nothing(self):
        cache = PlanCache(max_bytes=30)
        with pytest.raises(ZeroDivisionError):
            cache.get("a", lambda: Entry(1 // 0))
        assert cache.info() == (0, 0, 0, 0, 0, 30)

    def test_sixteen_threads_ask_resize_and_clear(self):
        cache, wrong = PlanCache(max_bytes=500), []

        def work(seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(1500):
                action = draw.random()
                if action < 0.02:
                    cache.clear()
                elif action < 0.05:
                    cache.resize(draw.choice([0, 200, 500]))
                size = draw.randint(1, 60)
                if cache.get(size, lambda size=size: Entry(size)).nbytes != size:
                    wrong.append(size)
                info = cache.info()
                if info.bytes > info.max_bytes or info.bytes < info.entries:
                    wrong.append(info)

        in_sixteen_threads(work)
        assert not wrong
        assert cache.info().bytes == sum(size for _, size in cache._entries.values())

    def test_what_is_made_under_inference_mode_serves_training(self):
        """Inference tensors cannot be saved for a backward."""
        pattern = Dilated((16, 32), (1, 2)) * (lambda length: BlockLayout.local(length, 5, 4))
        q, k, v = (torch.randn(1, 32, 2, 8, requires_grad=True) for _ in range(3))
        with torch.inference_mode():
            expected = attention(q, k, v, pattern)
        out = attention(q, k, v, pattern)
        out.sum().backward()
        assert torch.equal(out, expected)
        with torch.inference_mode():
            assert PlanCache(1).get("a", lambda: Entry(int(torch.is_grad_enabled()))) == Entry(0)

    def test_an_argument_with_a_key_is_compared_by_it_and_not_kept(self):
        cache, made, mask = PlanCache(1000), [], torch.ones(3)

        def make(named, number):
            made.append(number)
            return Entry(10)

        for number in (1, 1, 2):
            cache.of(make, Named(mask), number)
        mask.zero_()
        cache.of(make, Named(mask), 1)
        assert made == [1, 2, 1]
        held = weakref.ref(mask)
        del mask
        gc.collect()
        assert held() is None

    def test_plans_are_kept(self):
        plan_cache.clear()
        arguments = (8, 16), (1, 2), ((0, 0), (0, 1)), 100
        assert plan_dilated(*arguments) is plan_dilated(*arguments)
        assert plan_cache.info()[:2] == (1, 1)


def pretend_gpu(monkeypatch, stream):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


class Operations(TorchDispatchMode):
    """Record the operations that the calling thread runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_what_is_kept_is_made_outside_of_a_graph_s_warm_up(monkeypatch):
    """There the calling thread and its stream allocate in the graph's memory: the copies come from another thread, on a
    stream that waits for nothing and that nobody reads before it is done."""
    happened = []

    class Stream:
        def synchronize(self):
            happened.append(("synchronize", threading.get_ident()))

    pretend_gpu(monkeypatch, Stream)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device: happened.append(("copy", threading.get_ident())) or x)
    table = tiles._to(torch.device("cuda", 0), np.ones((1, 12), np.int64))
    assert table.shape == (1, 12)
    here = threading.get_ident()
    assert [(what, thread == here) for what, thread in happened] == [
        ("synchronize", True), ("copy", False), ("synchronize", False)
    ]  # fmt: skip
    happened.clear()
    assert lasting(threading.get_ident, torch.device("cpu")) == here
    assert not happened

    def fails():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        lasting(fails, torch.device("cuda", 0))


def one_head(layout):
    (group,) = plan_dilated((16,), (1,), ((0, 0),), 16).groups
    tile = native._Tile(range(1), range(1), range(1), range(1, 2), range(1, 2), 0)
    return tile.layout({16: layout}, group)


@pytest.mark.parametrize(
    "derive",
    [
        lambda layout: layout.transposed,
        lambda layout: blocks.groups_of(layout, 0),
        lambda layout: execution._part_of_layout(layout, None, 2, 16, True, torch.device("cuda", 0)),
        one_head,
    ],
    ids=["transposed", "block plan", "causal", "one head"],
)
def test_tables_of_a_layout_on_a_gpu_are_made_outside_of_a_graph_s_warm_up(derive, monkeypatch):
    layout, here = BlockLayout.from_mask(torch.ones(2, 4, 4, dtype=torch.bool), block_size=4), threading.get_ident()

    def device(layout):
        return torch.device("cuda", 0) if threading.get_ident() == here else torch.device("cpu")

    monkeypatch.setattr(BlockLayout, "device", property(device))
    monkeypatch.setattr(BlockLayout, "to", lambda layout, device: layout)
    pretend_gpu(monkeypatch, Mock)
    with Operations() as operations:
        derive(layout)
    assert not operations.names


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_forks_and_signal_handlers_beside_calls(fresh_python):
    """A child or a handler that found the cache's lock taken would wait for ever."""
    fresh_python(
        """
        import os, signal, sys, threading, time, warnings
        import torch
        from dilated_attention import Dilated, attention, plan_cache

        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        sys.setswitchinterval(1e-5)
        x = torch.randn(1, 16, 2, 8)
        pattern = Dilated([8], [1])
        attention(x, x, x, pattern)
        ends = threading.Event()

        def work():
            while not ends.is_set():
                plan_cache.get(("a key", pattern), lambda: None)  # it hashes a pattern, which takes Python time

        plan_cache.get(("a key", pattern), lambda: torch.ones(1))
        other = threading.Thread(target=work)
        other.start()
        for _ in range(60):
            child = os.fork()
            if child == 0:
                plan_cache.info()
                os._exit(0)
            for _ in range(2000):
                if os.waitpid(child, os.WNOHANG)[0]:
                    break
                time.sleep(0.005)
            else:
                os.kill(child, signal.SIGKILL)
                ends.set()
                raise SystemExit("a child hangs")
        ends.set()
        other.join()

        handled = []
        signal.signal(signal.SIGALRM, lambda *_: handled.append(attention(x, x, x, pattern)))
        signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
        while len(handled) < 200:
            attention(x, x, x, pattern)
        signal.setitimer(signal.ITIMER_REAL, 0)
        """
    )
