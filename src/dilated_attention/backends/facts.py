"""Hold the facts of a call on which the choice of a backend depends."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Facts(NamedTuple):
    """Hold the facts of a call that decide which backends can serve it.

    Attributes:
        seq_len: the number of tokens on this device; 1 while a graph is traced, which must not bound its length.
        needs: what the call needs beyond q, k, v and causality: "key_padding_mask", "a block layout", "a window", and
            those of `Scores` and of `bias.Normal`.
        work: an estimate of the call's score entries times head_dim.
        over_mesh: whether the call's sequence is sharded over a mesh.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int = 64
    seq_len: int = 1
    needs: tuple[str, ...] = ()
    work: int = 0
    over_mesh: bool = False
