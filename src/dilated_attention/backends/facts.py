"""What a choice of backend rests on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Facts:
    """Facts of a call, by which backends refuse it or not.

    Attributes:
        seq_len: of the rows on this device.
        needs: what the call asks for beyond q, k, v and causality: "key_padding_mask", "dropout_p",
            "a block layout", "a window", "softcap".
        work: about how many score entries the call has, times head_dim.
        over_mesh: its sequence is sharded over a mesh.
        keys: that a query sees in whole segments of all its branches.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int = 64
    seq_len: int = 1
    needs: tuple[str, ...] = ()
    work: int = 0
    over_mesh: bool = False
    keys: int = 1024
