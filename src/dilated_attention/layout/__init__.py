"""Describe block layouts: for every block of queries, the sorted list of key blocks that it sees."""

import torch

from dilated_attention.layout.conversions import DENSE_LIMIT
from dilated_attention.layout.value import BlockLayout, warn_of_blind

torch.serialization.add_safe_globals([BlockLayout])  # torch.load calls its constructor, which checks the lists

__all__ = ["DENSE_LIMIT", "BlockLayout", "warn_of_blind"]
