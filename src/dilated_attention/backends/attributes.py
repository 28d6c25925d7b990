"""Hold what a backend reads per token besides q, k and v."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxtyping import Bool, Int64
from torch import Tensor

from dilated_attention.backends import dropout


@dataclass(frozen=True, slots=True, eq=False)
class Attributes:
    """Hold tensors with a few numbers per token, by name: `queries` for the rows of q, `keys` for the rows of k and v.

    Each is `(batch or 1, rows, heads or 1, ...)`, with query heads in `queries` and KV heads in `keys`. Where rows are
    cut, packed or gathered, all attributes go with them.

        keys["hidden"]       bool: no query sees the key
        queries["words"]     int32 (..., 2), keys["words"] int32: the hash words of dropout (`backends.dropout`)
        queries["places"], queries["where"], keys["where"]: what a bias reads (`bias.attributes`)
    """

    queries: Mapping[str, Tensor] = field(default_factory=dict)
    keys: Mapping[str, Tensor] = field(default_factory=dict)

    def and_(self, queries: Mapping[str, Tensor], keys: Mapping[str, Tensor]) -> Attributes:
        """Return these attributes with others of the same rows."""
        return Attributes({**self.queries, **queries}, {**self.keys, **keys})

    def sample(self, batch: slice, seq: slice) -> Attributes:
        """Return the attributes of the samples `batch`, with the tokens `seq` as queries and as keys."""

        def part(x: Tensor) -> Tensor:
            if len(x) == 1:
                return x[:, seq]
            return x[batch, seq]

        return self._each(part)

    def packed(self, batch: int) -> Attributes:
        """Return the attributes of `batch` samples joined into one sequence."""
        return self._each(lambda x: x.expand(batch, *x.shape[1:]).flatten(0, 1).unsqueeze(0))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Attributes:
        of_queries = {name: change(x) for name, x in self.queries.items()}
        of_keys = {name: change(x) for name, x in self.keys.items()}
        return Attributes(of_queries, of_keys)


NO_ATTRIBUTES = Attributes()


def attributes_of(
    batch: int,
    heads: int,
    queries: Int64[Tensor, " rows"],
    keys: Int64[Tensor, "keys kv_heads"],
    *,
    hidden: Bool[Tensor, "batch keys #kv_heads"] | None = None,
    seed: Int64[Tensor, ""] | None = None,
    first_head: int = 0,
) -> Attributes:
    """Return the attributes of a call's rows.

    Args:
        heads: how many query heads q has; first_head: the global index of the first one.
        queries, keys: the global position of each row, which may differ by KV head where rows were gathered.
        hidden: True for a key that no query sees.
        seed: the seed of dropout.
    """
    of_queries: dict[str, Tensor] = {}
    of_keys: dict[str, Tensor] = {}
    if hidden is not None:
        of_keys["hidden"] = hidden
    if seed is not None:
        of_queries["words"] = dropout.query_words(seed, batch, heads, queries, first_head)
        of_keys["words"] = dropout.key_words(seed, keys)
    return Attributes(of_queries, of_keys)
