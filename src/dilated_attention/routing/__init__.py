"""Layouts that follow content: which key blocks are worth a query block's attention.

Each function estimates the share of a query block's softmax that falls on each key block, from few rows, and keeps the
blocks with the largest share. Results are `BlockLayout`s per (batch, head) on the device of q, made without gradients.

**Estimate.** The queries of a block are replaced by the means of `QUERY_PARTS` consecutive parts. The keys of a block
are replaced by its `KEY_PEAKS` keys with the largest score under the mean query, and the mean of all others counted
with its multiplicity: attention is carried by few keys that most queries score high, and a mean alone hides them. With
q̃ the pooled queries and (k̃, n) the pooled keys, share(i, J) is the mean over q̃ of the softmax over all (J, k̃) of
scale q̃·k̃ + log n, summed over the k̃ of J.

**Causal guarantee.** With `is_causal`, what the queries up to token t see is a function of the tokens up to t. The list
of query block i is made from the tokens up to its first query, i * q_block. Its pooled queries are those of the q_block
queries that end there, and that query itself. Its candidates are the key blocks that end there or earlier; the key
blocks that later tokens of the block reach (the diagonal) are always listed. The direction that picks a key block's
peaks is the mean query up to the first query block that may choose that key block.

**Forecast.** A causal estimate therefore describes the block before; and some heads attend to certain tokens, others
at certain distances. In all functions but hierarchical_blocks and vertical_slash the shares are a mixture of three
forecasts: the estimate as it is; the estimate moved along by one block; and the mean share at each distance so far. For
a few earlier tokens, the softmax over some of their keys is computed, O(seq_len) scores in all. This softmax gives the
shares by distance and, for each head and row, the weights of the mixture: a forecast's weight is ∝ prior *
exp(`FORECAST_RATE` * the mass of that softmax that its lists would have held), the exponentially weighted average
forecaster (Cesa-Bianchi and Lugosi 2006, Prediction, Learning, and Games, chapter 2).
"""

from dilated_attention.routing.antidiagonal import antidiagonal_blocks
from dilated_attention.routing.hashing import lsh_blocks
from dilated_attention.routing.indexer import Indexer
from dilated_attention.routing.learned import LearnedRouter
from dilated_attention.routing.lines import vertical_slash
from dilated_attention.routing.pages import PageBounds, page_bounds
from dilated_attention.routing.selectors import density_schedule, hierarchical_blocks, topk_blocks, topp_blocks

__all__ = [
    "Indexer",
    "LearnedRouter",
    "PageBounds",
    "antidiagonal_blocks",
    "density_schedule",
    "hierarchical_blocks",
    "lsh_blocks",
    "page_bounds",
    "topk_blocks",
    "topp_blocks",
    "vertical_slash",
]
