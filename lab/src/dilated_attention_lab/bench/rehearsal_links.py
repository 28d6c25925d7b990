"""Replace the link to a network by one that moves nothing, or by one that hides no communication."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dilated_attention.plumbing import Framing, Link, Transfer


class RehearsalLink(Link):
    """Count the transfers of a rank whose peers do not exist. They take no time, and fill buffers with random normals.

    Attributes:
        filled: seconds of CPU time spent drawing the normals, which no real rank spends.
    """

    filled: float = 0.0

    def exchange(self, buffer: Tensor, send: Tensor, received: Framing, sent: Framing) -> list[dist.Work]:
        return []

    def gather(self, buffer: Tensor, send: Tensor, sent: Framing) -> list[dist.Work]:
        return []

    def post(self, operations: list[dist.P2POp]) -> list[dist.Work]:
        return []

    def received(self, transfer: Transfer) -> None:
        begin = time.process_time()
        if transfer.buffer.is_floating_point():
            transfer.buffer.normal_()
        self.filled += time.process_time() - begin


class PatientLink(Link):
    """Wait for every transfer where it starts, to measure how much communication other links hide."""

    def started(self, works: list[dist.Work], *arguments: Any) -> Transfer:
        with self.guard("while waiting"):
            for work in works:
                work.wait()
        return super().started(works, *arguments)
