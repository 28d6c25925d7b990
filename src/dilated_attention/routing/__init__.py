"""Block layouts that follow content: choose the key blocks that are worth a query block's attention.

Each function estimates, from few rows, which share of a query block's softmax falls on each key block, and keeps the
blocks with the largest shares. The result is a `BlockLayout` with a list per batch element and head, on the device of
q, made without gradients.

**Estimate.** A query block is represented by `QUERY_PARTS` queries, the means of its consecutive parts. A key block is
represented by the `KEY_PEAKS` keys that score highest under the mean query, and by the mean of its other keys, which
counts as many times as there are such keys. (Most attention goes to few keys that most queries score high, and a mean
alone hides them.) With q̃ the pooled queries, k̃ the pooled keys and n the number of keys that each k̃ represents,
share(i, J) is the softmax over all k̃ of scale q̃·k̃ + log n, summed over the k̃ of key block J, and averaged over the
q̃ of query block i.

**Causal guarantee.** With `is_causal`, what the queries up to token t see depends only on the tokens up to t (but with
`lookahead` of `sampled_blocks`, on those up to the end of t's query block). The list of query block i is made from the
tokens up to its first query, i * q_block. Its pooled queries are made from the q_block queries that end there, and from
that query itself. It chooses among the key blocks that end there or earlier; the key blocks that its later tokens reach
(the diagonal) are always listed. The mean query that selects the peaks of a key block is taken over all queries up to
the first query block that may choose that key block.

**Forecast.** A causal estimate therefore describes the block before; and some heads attend to certain tokens, others at
certain distances. In all functions but hierarchical_blocks the shares are a mixture of three forecasts: the estimate as
it is; the estimate moved along by one block; and the mean share at each distance so far. For a few earlier tokens, the
softmax over some of their keys is computed, O(seq_len) scores in all. This softmax gives the shares by distance and,
for each head and row, the weights of the mixture: a forecast's weight is ∝ prior * exp(`FORECAST_RATE` * m), with m the
part of that softmax on the blocks that the forecast alone would have listed. This is the exponentially weighted average
forecaster (Cesa-Bianchi and Lugosi 2006, Prediction, Learning, and Games, ch. 2).
"""

from dilated_attention.routing.hashing import lsh_blocks
from dilated_attention.routing.indexer import Indexer
from dilated_attention.routing.learned import LearnedRouter
from dilated_attention.routing.pages import PageBounds
from dilated_attention.routing.selectors import (
    density_schedule,
    hierarchical_blocks,
    sampled_blocks,
    topk_blocks,
    topp_blocks,
)

__all__ = [
    "Indexer",
    "LearnedRouter",
    "PageBounds",
    "density_schedule",
    "hierarchical_blocks",
    "lsh_blocks",
    "sampled_blocks",
    "topk_blocks",
    "topp_blocks",
]
