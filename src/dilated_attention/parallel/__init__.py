"""Context parallelism: compute attention over a sequence that is sharded contiguously over the ranks of a group."""

from dilated_attention.parallel.choosing import choose_blocks
from dilated_attention.parallel.modules import set_context_parallel
from dilated_attention.parallel.sharding import cp_mean, sequence_range, shard_labels, shard_sequence, unshard_sequence
from dilated_attention.parallel.traffic import ExchangePlan, exchange_plan

__all__ = [
    "ExchangePlan",
    "choose_blocks",
    "cp_mean",
    "exchange_plan",
    "sequence_range",
    "set_context_parallel",
    "shard_labels",
    "shard_sequence",
    "unshard_sequence",
]
