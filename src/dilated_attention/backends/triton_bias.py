"""Turn a bias into the arguments of kernels/biases.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dilated_attention.backends.problem import Problem
from dilated_attention.bias import DISTANCES, FORMS

NAMES = ("BIAS", "PLACES", "QUERY_AT", "KEY_AT", "BUCKETS")
"""The tensors that kernels read for a bias."""


@dataclass(frozen=True, slots=True, eq=False)
class Biased:
    """Hold the arguments of the kernels for a bias, or for no bias.

    Attributes:
        tensors: by name, in the order of NAMES; empty without a bias.
        others: the other arguments, by name.
    """

    tensors: dict[str, Tensor | None]
    others: dict[str, Any]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return everything on which a compiled kernel depends, apart from strides and alignments."""
        dtypes = [None if x is None else x.dtype for x in self.tensors.values()]
        return (*dtypes, *self.others.values())


NO_BIAS = Biased({}, {
    **dict.fromkeys((*NAMES, "FORM", "SIZES")), **dict.fromkeys(("psb", "qab", "kab"), 0), "AXES": 1,
})  # fmt: skip


def biased(problem: Problem) -> Biased:
    """Return the bias of a problem as the kernels read it."""
    source = problem.bias
    if source is None:
        return NO_BIAS
    places = problem.attributes.queries["places"].contiguous()
    query_at = problem.attributes.queries["where"][:, :, 0].contiguous()
    key_at = problem.attributes.keys["where"][:, :, 0].contiguous()
    buckets = source.buckets
    if buckets is not None:
        buckets = buckets.contiguous()

    name = FORMS[source.form]
    sizes: tuple[int, ...] | None = None
    if name == "by query":
        sizes = (source.shape[3],)
    elif name not in (*DISTANCES, "by pair"):
        sizes = tuple(source.shape[2:] if buckets is None else buckets.shape)
    tensors = source.tensor.detach().contiguous(), places, query_at, key_at, buckets
    return Biased(
        dict(zip(NAMES, tensors, strict=True)),
        {
            "FORM": name, "SIZES": sizes, "AXES": query_at.shape[2], "psb": _step(places), "qab": _step(query_at),
            "kab": _step(key_at),
        },
    )  # fmt: skip


def _step(x: Tensor) -> int:
    """Return the stride of a sample; 0 if all samples share one."""
    return x.stride(0) if len(x) > 1 else 0
