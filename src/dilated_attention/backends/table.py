"""Register the backends and choose among them.

Whether a backend serves a call, and whether `auto` chooses it, depends on facts of the call and on what the machine
supports. Every refusal is a sentence that says why, and where possible what would serve the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dilated_attention.backends import cpu, native, reference, triton
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.problem import Repeat
from dilated_attention.cache import derived
from dilated_attention.errors import BackendError, UnsupportedError


def _absent(*_: Any, **__: Any) -> Any:
    raise AssertionError("`attend` serves")


@dataclass(frozen=True)
class Backend:
    """Describe one way to compute attention.

    Attributes:
        merits: the reason that is reported when `auto` chooses this backend.
        refusal: returns why it cannot serve a call, and what would serve it; None if it can.
        on_request: returns why `auto` does not choose it for a call that it could serve; None if `auto` may.
        forward, backward: compute a `Problem`; the arguments are those of `native`.
        prepare: returns a function that repeats a forward for tensors like the given ones, whose rows are dense, with
            little work for the host, and the bytes that it keeps; None if there is none. The problem has nothing that
            is read of tensors: the function takes a mask and lengths.
        any_strides: what it prepared serves all tensors with dense rows.
        attend: replaces these two by a function that autograd differentiates. It has the arguments and results of
            `reference_attention`.
        over_mesh: forward and backward can continue a running state. A rank needs this to compute a call over a mesh
            in parts.
        masks_over_mesh: they can also do so with a key mask or dropout, which differ by KV head where received rows do.
        packs_samples: it computes all samples of a ragged call as one sequence with one plan.
        skips_rows: it never reads a hidden row of k and v, and it computes all samples of a padded batch with one plan,
            without the rows after their ends (`Problem.lengths`).
        lists_per_query_head: it needs block lists for each query head, even where those of a KV head share them.
        details: what else `explain` should say about a call that it serves.
    """

    name: str
    merits: str
    refusal: Callable[[Facts], str | None]
    on_request: Callable[[Facts], str | None]
    forward: Callable[..., tuple[Tensor, Tensor]] = _absent
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = _absent
    prepare: Callable[..., tuple[Repeat, int] | None] = lambda *_: None
    any_strides: bool = False
    attend: Callable[..., tuple[Tensor, Tensor]] | None = None
    over_mesh: bool = False
    masks_over_mesh: bool = False
    packs_samples: bool = False
    skips_rows: bool = False
    lists_per_query_head: bool = False
    details: Callable[[Facts], str] | None = None

    def why_not(self, facts: Facts) -> str | None:
        """Return why this backend cannot serve a call: what it lacks over a mesh, or its `refusal`; None if it can."""
        if facts.over_mesh:
            if not self.over_mesh:
                return "it sees one device, and the call has a mesh"
            given = [name for name in facts.needs if name in ("key_padding_mask", "dropout_p")]
            if given and not self.masks_over_mesh:
                return f"over a mesh it takes no {' and no '.join(given)}; native does"
        return self.refusal(facts)


_REGISTERED = (
    Backend(
        "triton", "one kernel for all branches or blocks, shown right on this GPU and faster for such calls",
        triton.refusal, triton.on_request, triton.forward, triton.backward, triton.prepare, over_mesh=True,
        packs_samples=True,
    ),
    Backend(
        "cpu", "our own kernels in C++, measured as fast as PyTorch's operators or faster",
        cpu.refusal, cpu.on_request, cpu.forward, cpu.backward, cpu.prepare, any_strides=True, over_mesh=True,
        packs_samples=True, skips_rows=True,
        details=lambda facts: cpu.instruction_set_of(facts.dtype),
    ),
    Backend(
        "native", "PyTorch's fused attention serves every device",
        native.refusal, lambda _: None, native.forward, native.backward, over_mesh=True, masks_over_mesh=True,
        lists_per_query_head=True,
    ),
    Backend(
        "reference", "the definition, in double precision",
        reference.refusal, lambda _: "quadratic in the sequence; only on request",
        attend=reference.reference_attention,
    ),
)  # fmt: skip
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in _REGISTERED}
"""The backends by name, in the order in which `auto` tries them."""


@dataclass(frozen=True)
class Choice:
    """Hold the backend that serves a call, and why: the caller named it, or `auto` chose it from the facts."""

    backend: Backend
    by_name: bool = True
    facts: Facts | None = None

    @derived
    def masked(self) -> Choice:
        """Return the choice for the same call with a key mask."""
        assert self.facts is not None
        name = self.backend.name if self.by_name else "auto"
        return choose(name, self.facts._replace(needs=(*self.facts.needs, "key_padding_mask")))

    @property
    def reason(self) -> str:
        why = "asked for by name" if self.by_name else self.backend.merits
        details = self.backend.details
        if details is None or self.facts is None:
            return why
        return f"{why}; {details(self.facts)}"

    @property
    def refusals(self) -> dict[str, str]:
        """Return, by name, why each other backend cannot serve the call or was passed over; {} if `facts` is None."""
        if self.facts is None:
            return {}
        return _refusals(self.facts, self.backend)


def check_name(name: str) -> None:
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of {('auto', *BACKENDS)}; got {name!r}")


def choose(name: str, facts: Facts) -> Choice:
    """Choose the backend for a call: the named one, or for "auto" the first one whose `refusal` and `on_request` allow
    it.

    Raises BackendError, with the reasons, if the named backend refuses the call, or if "auto" finds none.
    Raises UnsupportedError if the named backend serves no mesh and the call has one.
    """
    if name == "auto":
        for backend in BACKENDS.values():
            if backend.on_request(facts) is None and backend.why_not(facts) is None:
                return Choice(backend, False, facts)
        refusals = "; ".join(f"{name}: {why}" for name, why in _refusals(facts).items())
        raise BackendError(f"no backend can serve this call: {refusals}")
    check_name(name)
    if facts.over_mesh and not BACKENDS[name].over_mesh:
        raise UnsupportedError(f"backend={name!r} sees one device; with a mesh use backend='auto'")
    why = BACKENDS[name].why_not(facts)
    if why is not None:
        raise BackendError(f"backend={name!r} cannot serve this call: {why}")
    return Choice(BACKENDS[name], True, facts)


def _refusals(facts: Facts, chosen: Backend | None = None) -> dict[str, str]:
    refusals: dict[str, str] = {}
    for backend in BACKENDS.values():
        if backend is chosen:
            continue
        why = backend.why_not(facts)
        if why is None:
            why = backend.on_request(facts)
        if why is None:
            why = "another one comes first"
        refusals[backend.name] = why
    return refusals
