"""Define how a score is made from a query and a key, and what becomes of its weight."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import compress
from typing import NamedTuple, TypedDict

import torch

from dilated_attention import checks

_LEAST_SCALE, _GREATEST_SCALE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max / 2


class ScoreOptions(TypedDict, total=False):
    """Hold the options of a public call that `Scores.of` reads; `attention` says what they mean."""

    scale: float | None
    softcap: float | None
    dropout_p: float


class Scores(NamedTuple):
    """Hold the numbers that turn q_i · k_j into a weight of the softmax, from the call to the kernels.

        s_ij = cap(scale q_i · k_j) + b(i, j),        cap(s) = softcap tanh(s / softcap)

    Each weight is then dropped with probability dropout_p, and the others are divided by 1 - dropout_p.

    `bias` says which form b has, as an index of `bias.FORMS`. Each field is one number. All but scale change nothing
    where they are 0. A field that is added here reaches every backend and every rank. Kernels in C++ need it in
    `Scores` of kernels/cpu/call.h, too. A backend that does not compute it has to refuse it.
    """

    scale: float
    softcap: float = 0.0
    dropout_p: float = 0.0
    bias: float = 0.0

    @classmethod
    def of(cls, head_dim: int, options: ScoreOptions) -> Scores:
        """Check the numbers of a call, and replace those that are not given."""
        scale, cap, dropout_p = options["scale"], options["softcap"], options["dropout_p"]
        checks.number("scale", scale)
        checks.probability("dropout_p", dropout_p)
        if scale is None:
            scale = head_dim**-0.5
        cap = 0.0 if cap is None else checks.positive_number("softcap", cap)
        return cls(float(scale), cap, float(dropout_p))

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the names of the numbers, other than scale, that change something."""
        return tuple(compress(self._fields[1:], self[1:]))

    @lru_cache(maxsize=256)  # noqa: B019, it keeps a few numbers alive
    def split(self) -> tuple[float, Scores]:
        """Return (factor, rest): q is multiplied by factor, and backends get rest, whose scale is positive.

        A scale of 0 or below would turn a score of -inf into NaN or +inf. In single precision the scale of rest does
        not round to 0, and its product with log2 e is finite.
        """
        if abs(self.scale) < _LEAST_SCALE:
            return self.scale, self._replace(scale=1.0)
        factor = math.copysign(1.0 if abs(self.scale) <= _GREATEST_SCALE else 2.0, self.scale)
        return factor, self._replace(scale=self.scale / factor)


UNIT = Scores(1.0)
