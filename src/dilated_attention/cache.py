"""Cache checked calls, plans, layouts and device tables, up to a limit in bytes.

This module also gives tables names for use in cache keys.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from numbers import Integral
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dilated_attention.torch_internals import untransformed

Value = TypeVar("Value")

_names = WeakTensorKeyDictionary()
_numbers = count()


def name_of(thing: Any) -> int:
    """Return a number that identifies `thing` as long as it lives; a tensor gets another number after it is written to.
    It names a layout's tensors, which stay the same objects when they pass through PyTorch's dispatcher; a layout does
    not."""
    version = _version(thing)
    name, named = _names.get(thing, (0, None))
    if named is None or named != version:
        name = next(_numbers)
        _names[thing] = name, version
    return name


def is_named(table: Tensor) -> bool:
    """Return whether `name_of` has named this table, and it has not been written to since. A table without a name may
    still be written to by the code that made it."""
    named = _names.get(table)
    return named is not None and named[1] == _version(table)


def _version(thing: Any) -> int:
    if isinstance(thing, Tensor) and not thing.is_inference():
        return thing._version
    return 0


class CacheInfo(NamedTuple):
    """Hold the counters of a `PlanCache` since it was made or cleared; sizes in bytes."""

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int
    max_bytes: int


class PlanCache:
    """Cache plans by key; discard the least recently used ones when a limit in bytes is exceeded. Thread-safe.

    Values state their own size through an `nbytes` attribute. A value larger than the whole cache is returned but not
    kept. A value used while a CUDA graph is captured is kept permanently and does not count towards the limit, because
    the graph reads its memory.

    Examples:
        >>> from dilated_attention import plan_cache  # the process-wide cache, a PlanCache
        >>> info = plan_cache.info()
        >>> info.bytes <= info.max_bytes
        True
    """

    def __init__(self, max_bytes: int) -> None:
        self._lock = threading.RLock()  # a signal handler may call the library, too
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()  # values and their sizes
        self._captured: dict[int, Any] = {}
        self._max_bytes = max_bytes
        self._bytes = self._hits = self._misses = self._evictions = 0

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value of `key`, made with `make()` if the cache does not hold it: outside the lock, without
        gradients, and outside inference mode and transforms, whose tensors could not be used elsewhere."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._hits += 1
                self._entries[key] = entry  # now the last to be evicted
        value: Value
        if entry is not None:
            value, _ = entry
        else:
            value = self._make(key, make)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._captured[id(value)] = value
        return value

    def of(self, function: Callable[..., Value], *arguments: Any) -> Value:
        """Return `function(*arguments)`, which depends on the values of its arguments alone, as `get` does. An argument
        that has a `key`, like a layout, is compared by it, and the cache does not keep it alive."""
        compared = [getattr(argument, "key", argument) for argument in arguments]
        return self.get((function, *compared), partial(function, *arguments))

    def _make(self, key: Hashable, make: Callable[[], Value]) -> Value:
        with torch.inference_mode(False), torch.no_grad(), untransformed():  # the first alone would turn gradients on
            value = make()
        size: int = value.nbytes  # type: ignore[attr-defined]
        with self._lock:
            self._misses += 1
            if key not in self._entries and size <= self._max_bytes:
                self._entries[key] = value, size
                self._bytes += size
                self._evict()
        return value

    def grow(self, key: Hashable, value: Any, nbytes: int) -> None:
        """Add `nbytes` to the size of the entry of `key`, if it still holds this value, or one with the same
        `repeats`: a call at other positions or with a mask shares them with the call that is kept."""
        with self._lock:
            found, size = self._entries.get(key, (None, 0))
            if found is not None and found.repeats is value.repeats:
                self._entries[key] = found, size + nbytes
                self._bytes += nbytes
                self._evict()

    def _evict(self) -> None:
        while self._bytes > self._max_bytes:
            _, (_, size) = self._entries.popitem(last=False)
            self._bytes -= size
            self._evictions += 1

    def info(self) -> CacheInfo:
        """Return hits, misses, evictions, entries, bytes held and the limit, all read at one moment."""
        with self._lock:
            return CacheInfo(
                self._hits, self._misses, self._evictions, len(self._entries), self._bytes, self._max_bytes
            )

    def clear(self) -> None:
        """Drop every entry and set the counters to zero. Values that a CUDA graph reads stay in memory."""
        with self._lock:
            self._entries.clear()
            self._bytes = self._hits = self._misses = self._evictions = 0

    def resize(self, max_bytes: int) -> None:
        """Set the limit, in bytes, and evict what no longer fits."""
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, Integral) or max_bytes < 0:
            raise ValueError(f"max_bytes must be a non-negative integer, in bytes; got {max_bytes!r}")
        with self._lock:
            self._max_bytes = int(max_bytes)
            self._evict()


plan_cache = PlanCache(max_bytes=256 << 20)
"""The cache of checked calls, plans, layouts and their device tables, for the whole process.

The triton backend's tables take about 36 bytes per token for 16 heads and four branches, forward and backward.
"""

if hasattr(os, "register_at_fork"):  # a child whose parent held the lock in another thread would wait for ever
    _lock = plan_cache._lock
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class derived(Generic[Value]):  # noqa: N801, used like cached_property
    """Compute an attribute once, as `cached_property` does, but keep no tensor of a tracer.

    While torch.export traces, operators on real tensors return fake ones, which hold no numbers. A later call outside
    the trace would read them. (`cached_property` of Python 3.11 takes a lock, which `torch.compile` cannot.)
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self.compute = compute
        self.name = compute.__name__
        self.__doc__ = compute.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> Value:
        value = self.compute(instance)
        parts: tuple[Any, ...] = (value,)
        if isinstance(value, tuple):
            parts = value
        if not torch.compiler.is_compiling() and all(type(x) is Tensor for x in parts if isinstance(x, Tensor)):
            instance.__dict__[self.name] = value
        return value


def lasting(make: Callable[[], Value], device: torch.device) -> Value:
    """Return `make()`, with its tensors on `device` allocated outside the memory of any CUDA graph.

    While `torch.compile(mode="reduce-overhead")` warms up, what this thread allocates on its stream lies in the memory
    of the graph, which overwrites it when it runs. A separate thread on the default stream allocates as usual.
    """
    if device.type != "cuda":
        return make()

    def run() -> Value:
        with torch.cuda.device(device):
            value = make()
            torch.cuda.current_stream(device).synchronize()
        return value

    torch.cuda.current_stream(device).synchronize()  # what `make` reads
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


class Named(NamedTuple):
    """Stand for a thing that `PlanCache.of` compares by its name (`name_of`)."""

    thing: Any

    @property
    def key(self) -> int:
        return name_of(self.thing)


@dataclass(frozen=True, slots=True)
class Kept:
    """Hold a layout in the cache. Its size includes the tables that it may derive, each at most as large as itself."""

    layout: Any

    @property
    def nbytes(self) -> int:
        return 256 + 4 * self.layout.nbytes
