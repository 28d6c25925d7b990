"""Tables that their caller writes to, views, frees and allocates again: no call runs the plan of an earlier content.

`python tests/test_tables.py 10000` runs that many random sequences of calls, and as many of compiled ones.
"""

from __future__ import annotations

import gc
import random
import sys
from pathlib import Path

import pytest
import torch

from dilated_attention import BlockLayout, block_sparse_attention
from dilated_attention.backends import cpu

N, BLOCK, HEADS = 48, 8, 2
ROWS = N // BLOCK
BACKENDS = ["native", *(["cpu"] if cpu.missing() is None else [])]


def expected(q, k, v, blocks, is_causal):
    """out of dense attention under `blocks`, booleans (heads or 1, rows, rows); 0 where a query sees no key."""
    seen = blocks.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    seen = seen.tril() if is_causal else seen
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v)


def shown(order):
    """The blocks that `order`, (heads, rows, number), lists, as booleans."""
    return torch.zeros(*order.shape[:2], ROWS, dtype=torch.bool).scatter_(2, order, True)


def tables(order):
    """indptr and indices of the same blocks."""
    heads, rows, number = order.shape
    first = torch.arange(0, heads * rows * number, rows * number)[:, None]
    return (first + torch.arange(0, rows * number + 1, number))[None], order.sort(-1)[0].flatten()


def check(layout, blocks, is_causal, backend, inputs):
    out = block_sparse_attention(*inputs, layout, is_causal=is_causal, backend=backend)
    compare(out, inputs, lambda *wide: expected(*wide, blocks, is_causal), (backend, is_causal))


def compare(out, inputs, expect, case):
    """Hold out and the gradients of `inputs` against those of `expect` in float64."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    right = expect(*wide)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, dout)
    wanted = torch.autograd.grad(right, wide, dout.double())
    for x, y in zip((out, *found), (right, *wanted), strict=True):
        assert (x - y).abs().max() < 1e-4, case


def run(seed):
    """A random sequence of calls on tables that change between them."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    inputs = [torch.randn(1, N, HEADS, 8, requires_grad=True) for _ in range(3)]
    buffer, held = torch.empty(4 * ROWS * ROWS, dtype=torch.int64), []
    for _ in range(draw.randint(2, 4)):
        heads, number = draw.choice((1, HEADS)), draw.randint(1, 3)
        order = torch.rand(heads, ROWS, ROWS).argsort(-1)[..., :number]
        blocks, (indptr, indices) = shown(order), tables(order)
        kind = draw.choice(("refilled", "viewed", "new"))
        if kind != "new":  # in memory that earlier calls had their tables in
            start = draw.randint(0, 3) if kind == "viewed" else 0
            parts = buffer[start:].split(
                [indptr.numel(), indices.numel(), len(buffer) - start - indptr.numel() - indices.numel()]
            )
            indptr = parts[0].view(indptr.shape).copy_(indptr)
            indices = parts[1].copy_(indices)
        layout = BlockLayout(indptr, indices, N, BLOCK, BLOCK)
        is_causal, backend = draw.random() < 0.7, draw.choice(BACKENDS)
        check(layout, blocks, is_causal, backend, inputs)
        held.append((layout, blocks))
        if draw.random() < 0.3:  # the layout's own table is written to, and a new layout is made of it
            turned = order.flip(0) if heads > 1 else (order + 1) % ROWS
            layout.indices.copy_(tables(turned)[1])
            with pytest.raises(ValueError, match="written to"):
                check(layout, blocks, is_causal, backend, inputs)
            blocks = shown(turned)
            layout = BlockLayout(layout.indptr, layout.indices, N, BLOCK, BLOCK)
            held[-1] = layout, blocks
            check(layout, blocks, is_causal, backend, inputs)
        if draw.random() < 0.3:
            held.clear()
            del layout, indices, indptr
            gc.collect()
        elif draw.random() < 0.5:  # an earlier layout is still what it was
            check(*draw.choice(held), is_causal, backend, inputs)


def layers(q, k, v, layout, orders, is_causal, backend):
    """A layer over a layout from outside, then two whose tables are computed here, where Inductor may reuse memory."""
    q = q + block_sparse_attention(q, k, v, layout, is_causal=is_causal, backend=backend)
    for order in orders:
        inner = BlockLayout(*tables(order), N, BLOCK, BLOCK)
        q = q + block_sparse_attention(q, k, v, inner, is_causal=is_causal, backend=backend)
    return q


def run_compiled(seed, compiled):
    """A random sequence of calls of compiled `layers`, on tables in memory that earlier calls had theirs in."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    inputs = [torch.randn(1, N, HEADS, 8, requires_grad=True) for _ in range(3)]
    heads, number, is_causal, backend = HEADS, 2, draw.random() < 0.5, draw.choice(BACKENDS)
    buffer = torch.empty(3, heads, ROWS, number, dtype=torch.int64)
    kept = [torch.empty_like(table) for table in tables(buffer[0])]
    for _ in range(draw.randint(2, 4)):
        orders = torch.rand(3, heads, ROWS, ROWS).argsort(-1)[..., :number]
        orders = buffer.copy_(orders) if draw.random() < 0.5 else orders.contiguous()
        outer = [table.clone() for table in tables(orders[0])]
        if draw.random() < 0.5:
            outer = [x.copy_(table) for x, table in zip(kept, outer, strict=True)]
        layout = BlockLayout(*outer, N, BLOCK, BLOCK)
        blocks = [shown(order) for order in orders]
        out = compiled(*inputs, layout, orders[1:].unbind(), is_causal, backend)

        def expect(q, k, v, blocks=blocks):
            for seen in blocks:
                q = q + expected(q, k, v, seen, is_causal)
            return q

        compare(out, inputs, expect, (backend, is_causal))
        if draw.random() < 0.5:
            layout.indices.copy_(tables(orders[1])[1])  # the next layout may get this memory


@pytest.mark.parametrize("first", [0, *(pytest.param(x, marks=pytest.mark.thorough) for x in range(10, 60, 10))])
def test_random_sequences(first):
    for seed in range(first, first + 10):
        run(seed)


@pytest.mark.thorough
def test_random_compiled_sequences(compiling_python):
    compiling_python(
        f"""
        import sys, torch
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_tables import layers, run_compiled

        compiled = torch.compile(layers, fullgraph=True)
        for seed in range(20):
            run_compiled(seed, compiled)
        """
    )


def test_the_tables_of_a_layout_are_its_own():
    indptr, indices = torch.arange(ROWS + 1)[None, None], torch.zeros(ROWS, dtype=torch.int64)
    layout = BlockLayout(indptr, indices, N, BLOCK, BLOCK)
    indices.fill_(1)
    assert not layout.indices.any()


def test_a_layout_that_was_written_to_is_refused():
    layout, q = BlockLayout.local(N, 4, BLOCK), torch.randn(1, N, HEADS, 8)
    layout.indices[0] = 1
    for use in (lambda: block_sparse_attention(q, q, q, layout), layout.causal, lambda: layout | layout):
        with pytest.raises(ValueError, match=r"layout.*written to.*new BlockLayout"):
            use()


def test_tables_that_are_computed_in_a_compiled_graph(compiling_python):
    """Inductor gives the memory, and the tensor, of one layer's tables to the next layer's."""
    compiling_python(
        """
        import torch
        from dilated_attention import BlockLayout, block_sparse_attention

        def layer(x, channels):
            score = x[0, ::16, 0, :channels].sum(-1)
            indices = (score.abs() * 1000).long() % (torch.arange(16) + 1)
            layout = BlockLayout((torch.arange(17) + 0)[None, None], indices, 256, 16, 16)
            return block_sparse_attention(x, x, x, layout, is_causal=True)

        def layers(x):
            for channels in (3, 4, 5):
                x = layer(x.roll(3, 1) * 1.5, channels) + x
            return x

        x = torch.randn(1, 256, 2, 8)
        with torch.no_grad():
            compiled, expected = torch.compile(layers, fullgraph=True), layers(x)
            for _ in range(2):
                torch.testing.assert_close(compiled(x), expected)

            # A layout that was written to, which no graph can see.
            layout = BlockLayout.local(256, 16, 16)
            def call(x, layout):
                return block_sparse_attention(x, x, x, layout)
            compiled = torch.compile(call, fullgraph=True, backend="eager")
            compiled(x, layout)
            layout.indices[1] = 2
            torch.testing.assert_close(
                compiled(x, layout), call(x, BlockLayout(layout.indptr, layout.indices, 256, 16, 16))
            )
        """
    )


if __name__ == "__main__":
    gc.freeze()  # what was imported stays; walking through it takes nine tenths of the time
    for seed in range(int(sys.argv[1])):
        run(seed)
    compiled = torch.compile(layers, fullgraph=True)  # after the collections in `run`, which would walk its objects
    for seed in range(int(sys.argv[1])):
        run_compiled(seed, compiled)
    print(f"{sys.argv[1]} sequences: no stale plan")
