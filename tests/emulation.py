"""Gluon kernels for Hopper on threads and CPU tensors: what their barriers order, for tests.

A module of kernels is imported a second time with stand-ins for Gluon. Every partition of a program is a thread. What
runs asynchronously on a GPU runs as late as it may here: a copy lands in a thread of its own after a pause, a product
reads its buffers when it is waited for; so a buffer that is freed too early, or read before it is full, gives other
numbers, and a barrier that nobody completes ends in `TimeoutError`. Layouts mean nothing here: registers, swizzles and
the like are the compiler's.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch

PATIENCE = 20.0
"""Seconds that a barrier is waited for."""


class Pointer:
    """Into a flat tensor, at an offset or at a tensor of them."""

    def __init__(self, x, at=0):
        self.x, self.at = x, at

    def __add__(self, more):
        return Pointer(self.x, self.at + more)


class Buffer:
    """Shared memory; `index` and `permute` are views."""

    def __init__(self, x):
        self.x, self.dtype = x, x.dtype

    def index(self, i):
        return Buffer(self.x[int(i)])

    def permute(self, order):
        return Buffer(self.x.permute(order))


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have come."""

    def __init__(self):
        self.changed = threading.Condition()

    def init(self, count):
        self.count = self.pending = count
        self.bytes = self.phases = 0

    def update(self, arrivals=0, sent=0):
        with self.changed:
            self.pending -= arrivals
            self.bytes += sent
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if not self.pending and not self.bytes:
                self.pending = self.count
                self.phases += 1
                self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            if not self.changed.wait_for(lambda: self.phases % 2 != int(parity), PATIENCE):
                raise TimeoutError("a barrier that nobody completes")


class Barriers:
    def __init__(self, number):
        self.barriers = [Barrier() for _ in range(number)]

    def index(self, i):
        return self.barriers[int(i)]


class Box(SimpleNamespace):
    """A descriptor of a 2-D tensor `x`: boxes of `rows` rows and `columns` columns."""

    layout = None

    @property
    def dtype(self):
        return self.x.dtype


class Product:
    """An asynchronous product: computed when it is waited for, from what its buffers hold then."""

    def __init__(self, a, b, acc, use_acc):
        self.operands, self.result = (a, b, acc, use_acc), None

    def finish(self):
        if self.result is None:
            a, b, acc, use_acc = self.operands
            a, b = (x.x if isinstance(x, Buffer) else x for x in (a, b))
            self.result = a.float() @ b.float() + (acc if use_acc else 0)
        return self.result


class Device:
    """Runs the programs of one kernel; `seed` draws the pauses."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.local = threading.local()
        self.copies = []

    def pause(self, *seconds):
        time.sleep(self.random.choice(seconds))

    def copy(self, box, at, barrier, buffer, pred=True):
        if not pred:
            return
        row, column = (int(x) for x in at)
        assert 0 <= row <= box.x.shape[0] - box.rows
        assert 0 <= column <= box.x.shape[1] - box.columns

        def land():
            self.pause(0, 0, 1e-4, 1e-3)
            buffer.x.copy_(box.x[row : row + box.rows, column : column + box.columns])
            barrier.update(sent=-buffer.x.nbytes)

        thread = threading.Thread(target=land)
        self.copies.append(thread)
        thread.start()

    def product(self, a, b, acc, *, use_acc=True, is_async=False):
        product = Product(a, b, acc, use_acc)
        if not is_async:
            return product.finish()
        self.flying().append(product)
        return product

    def flying(self):
        if not hasattr(self.local, "flying"):
            self.local.flying = []
        return self.local.flying

    def wait_for_products(self, left, deps):
        flying = self.flying()
        while len(flying) > left:
            self.pause(0, 3e-3)
            flying.pop(0).finish()
        found = [x.result if isinstance(x, Product) else x for x in deps]
        assert all(x is not None for x in found), "the result of a product that may still run"
        return found[0] if len(found) == 1 else tuple(found)

    def specialize(self, partitions, warps, registers):
        errors = []

        def run(function, arguments):
            self.local.program = program
            try:
                function(*arguments)
            except BaseException as error:
                errors.append(error)

        program = self.local.program
        threads = [threading.Thread(target=run, args=partition) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in (*threads, *self.copies):
            thread.join()
        if errors:
            raise errors[0]

    def modules(self):
        """Gluon's modules, as kernels import them."""

        def allocate(dtype, shape, layout):
            if dtype == torch.int64:
                return Barrier() if len(shape) == 1 else Barriers(shape[0])
            return Buffer(torch.full(shape, torch.nan, dtype=dtype))

        def load(pointer):
            return int(pointer.x[pointer.at])

        def store(pointer, value):
            pointer.x[pointer.at] = value

        language = SimpleNamespace(
            constexpr=lambda x: x, static_range=range, program_id=lambda axis: self.local.program, load=load,
            store=store, full=lambda shape, x, dtype, layout: torch.full(shape, x, dtype=dtype),
            arange=lambda start, stop, layout: torch.arange(start, stop), maximum=torch.maximum, exp2=torch.exp2,
            log2=torch.log2, max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
            expand_dims=torch.unsqueeze, convert_layout=lambda x, layout: x, allocate_shared_memory=allocate,
            warp_specialize=self.specialize, float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16,
            int64=torch.int64, **dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout"),
                                               lambda *arguments: None),
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None, init=lambda barrier, count: barrier.init(count),
            expect=lambda barrier, number: barrier.update(arrivals=1, sent=number),
            arrive=lambda barrier, count: barrier.update(arrivals=count),
            wait=lambda barrier, parity: barrier.wait(parity),
        )  # fmt: skip
        root, names = ModuleType("gluon"), "triton.experimental.gluon.language.nvidia.hopper"
        root.gluon, root.jit, root.language = SimpleNamespace(jit=lambda f: f), lambda f: f, language
        root.mbarrier, root.tma = mbarrier, SimpleNamespace(async_copy_global_to_shared=self.copy)
        root.warpgroup_mma, root.warpgroup_mma_wait = self.product, self.wait_for_products
        return {"triton.experimental": root, "triton.experimental.gluon": root, names: root}

    def import_again(self, module):
        """A module whose kernels run here."""
        spec = importlib.util.spec_from_file_location(f"{module.__name__}_emulated", module.__file__)
        again = importlib.util.module_from_spec(spec)
        with patch.dict(sys.modules, self.modules() | {spec.name: again}):
            spec.loader.exec_module(again)
        return again

    def launch(self, kernel, grid, *arguments):
        for program in range(grid):
            self.local.program, self.copies = program, []
            kernel(*arguments)
