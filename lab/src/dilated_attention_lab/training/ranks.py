"""Train on several processes: samples over one axis of a mesh, tokens over the other, parameters over both."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dilated_attention.models import LongNetLM
from dilated_attention.parallel import set_context_parallel
from dilated_attention.plumbing import flattened
from dilated_attention_lab.training.checkpoint import Piece
from dilated_attention_lab.training.watch import Watch


@dataclass(frozen=True)
class Ranks:
    """Hold the processes of a run, as a mesh of two axes, `data` and `context`.

    Attributes:
        everyone: the two axes flattened: the parameters are sharded over it, and their gradients averaged.
        watch: the watch over all processes.
    """

    mesh: DeviceMesh
    everyone: DeviceMesh
    watch: Watch

    @classmethod
    def connect(cls, watch: Watch, context_parallel: int, device: torch.device) -> Ranks:
        """Form the group of the processes that `watch` has gathered: over NCCL if `device` is CUDA, else over gloo.

        Args:
            context_parallel: ranks that share a sequence; it passes `require_divisor`.
        """
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl" if device.type == "cuda" else "gloo"
        # NCCL's own watchdog ends the process without naming anybody: it comes last.
        patience = watch.timeout + (60 if backend == "nccl" else 0)
        watch.place = "while the processes connect"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", watch.store),
            rank=watch.rank,
            world_size=watch.size,
            timeout=timedelta(seconds=patience),
        )
        shape = (watch.size // context_parallel, context_parallel)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context"))
        return cls(mesh, flattened(mesh["data", "context"]), watch)

    def leave(self) -> None:
        """Leave the group at the end of a run.

        Threads of gloo that outlive their process group may abort the process.
        """
        dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Return whether this is the process that writes and reports."""
        return dist.get_rank() == 0

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    @property
    def data(self) -> int:
        """Return how many ranks share the samples of a batch."""
        return self.mesh["data"].size()

    def distribute(self, model: LongNetLM) -> None:
        """Shard a model's parameters over all ranks (FSDP2), and its sequences over the context axis."""
        set_context_parallel(model, self.mesh["context"])
        for block in model.blocks:
            fully_shard(block, mesh=self.everyone)
        fully_shard(model, mesh=self.everyone)

    def samples(self, batch: Tensor) -> Tensor:
        """Return the samples of a batch that this rank computes."""
        return batch.chunk(self.data)[self.mesh["data"].get_local_rank()]

    def mean(self, value: float) -> float:
        """Return the mean of all ranks' values."""
        total = torch.tensor(value, dtype=torch.float64, device=self.mesh.device_type)
        dist.all_reduce(total)
        return total.item() / self.size

    def greatest(self, value: int) -> int:
        """Return the greatest of all ranks' values, on every rank."""
        tensor = torch.tensor(value, device=self.mesh.device_type)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor.item())

    def gathered(self, value: bytes) -> list[bytes]:
        """Return all ranks' values, which have the same length, in the order of ranks, on every rank."""
        mine = torch.tensor(list(value), dtype=torch.uint8, device=self.mesh.device_type)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine)
        return [bytes(theirs.tolist()) for theirs in everyone]

    def gather(self, model: LongNetLM) -> LongNetLM | None:
        """Gather the weights, a call for all ranks: return the whole model on the first rank, None on the others."""
        weights = {name: self.whole(tensor) for name, tensor in model.state_dict().items()}
        if not self.first:
            return None
        alone = LongNetLM(model.config, backend=model.backend).to(next(iter(weights.values())).device)
        alone.load_state_dict(weights)
        return alone

    @property
    def sizes(self) -> dict[str, int]:
        """Return how many ranks share the samples of a batch (`data`), and how many share a sequence (`context`)."""
        return {"data": self.data, "context": self.mesh["context"].size()}

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a sharded tensor whole, on every rank; other tensors as they are."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def piece(self, tensor: Tensor) -> Piece:
        """Return this rank's rows of a sharded tensor, or a whole one. Only the last ranks may have fewer rows."""
        if not isinstance(tensor, DTensor):
            return Piece.whole(tensor)
        rows = -(-len(tensor) // self.everyone.size())
        first = min(len(tensor), rows * self.everyone.get_local_rank())
        return Piece(tensor.to_local(), first, tuple(tensor.shape))


def require_divisor(context_parallel: int, processes: int) -> None:
    """Raise ValueError unless the processes form groups of `context_parallel`."""
    if context_parallel < 1 or processes % context_parallel:
        raise ValueError(
            f"--context-parallel {context_parallel} must divide the number of processes, {processes}; "
            f"run under torchrun --nproc-per-node={max(context_parallel, 1)}"
        )
