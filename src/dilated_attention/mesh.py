"""Handle the mesh over which a sequence is sharded, and its process group."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.distributed_c10d import GroupMember

Mesh = DeviceMesh | ProcessGroup
"""A 1-D device mesh, or a process group."""


TRANSPORTS = ("exchange", "doubling", "ring", "all_gather", "ulysses")
"""The ways in which rows travel between ranks, in the order in which `auto` prefers them at equal cost."""


def check_transport(transport: str) -> None:
    if transport not in ("auto", *TRANSPORTS):
        raise ValueError(f"transport must be one of {('auto', *TRANSPORTS)}; got {transport!r}")


def context_group(mesh: Mesh) -> ProcessGroup:
    """Return the process group of a 1-D mesh; raise ValueError if this rank does not belong to it."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh must have one axis, the context axis; got {mesh.ndim} axes of sizes {tuple(mesh.shape)}. "
                'Slice it: mesh["context"]'
            )
        if mesh.get_coordinate() is None:
            raise ValueError(f"mesh holds ranks {mesh.mesh.tolist()}; this rank, {dist.get_rank()}, is not among them")
        return mesh.get_group()
    if mesh is GroupMember.NON_GROUP_MEMBER or (isinstance(mesh, ProcessGroup) and dist.get_rank(mesh) < 0):
        raise ValueError(f"mesh is a process group that this rank, {dist.get_rank()}, is not in")
    if not isinstance(mesh, ProcessGroup):
        raise ValueError(
            f"mesh must be a 1-D torch.distributed.DeviceMesh or a ProcessGroup; got {type(mesh).__name__}"
        )
    return mesh


def held_mesh(mesh: Mesh | None) -> DeviceMesh | None:
    """Return the mesh as a DeviceMesh, which unlike a group can be copied and pickled with a module; or None."""
    if mesh is None or isinstance(mesh, DeviceMesh):
        return mesh
    group = context_group(mesh)
    device = "cpu"
    if "nccl" in dist.get_backend(group):
        device = "cuda"
    return DeviceMesh.from_group(group, device)


def mesh_size(mesh: Mesh | None) -> int:
    """Return the number of ranks that share a sequence; 1 without a mesh."""
    if mesh is None:
        return 1
    return dist.get_world_size(context_group(mesh))
