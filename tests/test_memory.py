"""Memory stays bounded by `plan_cache`, whatever is called, from however many threads, and however long.

Both loops run in one new interpreter: the annotation checks of conftest.py cost ten times what these small calls do.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from dilated_attention import BlockLayout, Dilated, attention, dilated_attention, operators, plan_cache
from dilated_attention.cache import _names

LIMIT = 100_000
X = torch.randn(1, 64, 2, 4)


def test_memory_is_bounded(fresh_python):
    fresh_python(
        f"""
        import sys
        import torch
        from dilated_attention import plan_cache

        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_memory

        torch.set_num_threads(1)
        plan_cache.resize(test_memory.LIMIT)
        test_memory.make_three_thousand_calls()
        test_memory.make_a_thousand_short_lived_layouts()
        """
    )


def live_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


KEPT = [BlockLayout.local(n, 9, 16) for n in range(20, 60)]


def call(seed: int) -> None:
    """A call whose length, heads, pattern and options follow from the seed."""
    draw = random.Random(seed)
    if draw.random() < 0.05:
        layout = draw.choice(KEPT)
        x = X[:, : layout.seq_len]
        attention(x, x, x, layout, is_causal=draw.random() < 0.5)
        return
    n = draw.randint(1, 64)
    x = X[:, :n, : draw.randint(1, 2)]
    rate = draw.randint(1, 2)
    lengths = [draw.randint(0, n)] if draw.random() < 0.1 else None
    dilated_attention(x, x, x, [draw.randint(rate, 80)], [rate], is_causal=draw.random() < 0.5, lengths=lengths)
    assert plan_cache.info().bytes <= LIMIT


def make_three_thousand_calls() -> None:
    live = []
    with ThreadPoolExecutor(4) as threads:
        for first in range(0, 3_000, 750):
            assert sum(1 for _ in threads.map(call, range(first, first + 750), chunksize=50)) == 750
            live.append(live_objects())
    info = plan_cache.info()
    assert info.evictions > 1_500  # the cache has been full all the time
    # A cache that kept a plan a call would have grown by 6,000 objects from one reading to the next.
    assert max(live[1:]) - min(live[1:]) < 2_000, live
    plan_cache.clear()
    assert live_objects() < live[0]


def test_batches_of_packed_samples_over_a_mesh_are_forgotten():
    """Each step of a training packs other samples, whose edges an operator is given as numbers."""
    branches = (1, 0, 0, 0, 0, 0, 1, 0, 2048, 1, 0)
    tracemalloc.start()
    try:
        for step in range(300):
            edges = range(step << 20, (step << 20) + 1_000)
            operators._read((*branches, 2, 0, 1_000, len(edges), *edges, 0, 2, 64, 64), 1, True)
        assert tracemalloc.get_traced_memory()[0] < 6 << 20  # 300 of them: 14 MiB
    finally:
        tracemalloc.stop()
        operators._read.cache_clear()


def make_a_thousand_short_lived_layouts() -> None:
    """Layouts and callables go when the caller lets go of them and the cache has no room."""
    names = len(_names)
    alive: list[weakref.ref] = []
    for i in range(1_000):
        if i % 2:
            layout = BlockLayout.from_mask(torch.ones(1, 1, 1, 1, dtype=torch.bool), 16, 16)
            alive.append(weakref.ref(layout.indices))
            pattern = layout
        else:

            def of_length(n: int) -> BlockLayout:
                return BlockLayout.local(n, 9, 16)

            alive.append(weakref.ref(of_length))
            pattern = Dilated((16,), (1,)) * of_length
        attention(X[:, :16], X[:, :16], X[:, :16], pattern)
        assert plan_cache.info().bytes <= LIMIT
    del layout, pattern, of_length
    gc.collect()
    held = [x for x in alive if x() is not None]
    assert len(held) <= plan_cache.info().entries < 400
    plan_cache.clear()
    gc.collect()
    assert not any(x() is not None for x in alive)
    assert len(_names) <= names
