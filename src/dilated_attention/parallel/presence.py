"""Find out which ranks respond, which differ and which are silent, from what each writes to the rendezvous store.

A collective that fails does not say which rank caused it: the connection that breaks may belong to a healthy rank which
gave up a moment earlier, and a frozen rank breaks no connection at all. The store is apart from the group, so it still
answers.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import torch.distributed as dist

NAMED: Final = 16
"""The most ranks that a message lists."""
Answer = TypeVar("Answer")


def missing(store: dist.Store, keys: Sequence[str], seconds: float) -> list[int]:
    """Return the indices in `keys` of the keys that nobody has written within `seconds`."""
    deadline = time.monotonic() + seconds
    while not store.check(list(keys)):
        if time.monotonic() >= deadline:
            return _unwritten(store, keys, 0)
        time.sleep(max(0.02, len(keys) / 1000))  # a thousand ranks ask for a thousand keys each
    return []


def _unwritten(store: dist.Store, keys: Sequence[str], start: int) -> list[int]:
    """Find unwritten keys by bisection, and return start + i for each unwritten keys[i]."""
    if store.check(list(keys)):
        return []
    if len(keys) == 1:
        return [start]
    middle = len(keys) // 2
    return _unwritten(store, keys[:middle], start) + _unwritten(store, keys[middle:], start + middle)


def within(seconds: float, call: Callable[[], Answer]) -> Answer | None:
    """Return what `call` returns; None if it does not finish in time or raises a RuntimeError.

    The store may be gone or frozen with its host, so the call runs in a thread that may be left behind.
    """
    answers: list[Answer] = []

    def quietly() -> None:
        with suppress(RuntimeError):  # the store is gone and does not answer
            answers.append(call())

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def named(ranks: Sequence[int]) -> str:
    """Return the ranks as text, "rank 1, 2, 3". A long list is cut after the first ones."""
    text = f"rank {', '.join(map(str, ranks[:NAMED]))}"
    if len(ranks) > NAMED:
        text += f" and {len(ranks) - NAMED} more"
    return text


def differences(facts: Sequence[Mapping[str, str]], ranks: Sequence[int] | None = None) -> str:
    """Return, as text, which ranks' facts (name to value) differ from those that most ranks have, and in which names.

    If two sets of facts are equally frequent, the one of the lowest rank is taken as the common one. `ranks`: whose
    facts they are, ascending; None: those of all ranks.
    """
    if ranks is None:
        ranks = range(len(facts))
    texts = [json.dumps(dict(each), sort_keys=True) for each in facts]
    usual = facts[texts.index(Counter(texts).most_common(1)[0][0])]

    found: dict[str, list[int]] = {}
    for rank, mine in zip(ranks, facts, strict=True):
        if mine != usual:
            names = [name for name in {**usual, **mine} if mine.get(name) != usual.get(name)]
            what = [f"{name}={mine.get(name)}, elsewhere {name}={usual.get(name)}" for name in names]
            found.setdefault("; ".join(what), []).append(rank)
    lines = [f"{named(some)} has {what}" for what, some in found.items()]
    return f"{' | '.join(lines)} (elsewhere: rank {ranks[facts.index(usual)]})"


witness: Callable[[], str] | None = None
"""See `set_witness`."""


def set_witness(verdict: Callable[[], str] | None) -> None:
    """Call `verdict` when an exchange fails, to say which ranks are lost; None: ask the store again.

    `verdict` returns text for the error message, or "" if no rank is lost. Meant for a program that watches its ranks
    itself.
    """
    global witness
    witness = verdict
