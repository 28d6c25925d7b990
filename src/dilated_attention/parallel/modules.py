"""Context parallelism of a whole model."""

from __future__ import annotations

from torch import nn

from dilated_attention.parallel.sharding import Mesh, context_group


def set_context_parallel(module: nn.Module, mesh: Mesh | None, transport: str = "auto") -> None:
    """Let every attention of `module` run over `mesh`, on which its sequences are sharded; None: on one device again.

    What takes part has a method `set_context_parallel(mesh, transport, layer)` of its own: the attention modules of
    this library, and models whose positions or losses depend on where a shard lies. Errors name the layer.

    Raises ValueError where nothing in `module` takes part: its attention would see a shard only.
    """
    if mesh is not None:
        context_group(mesh)
    found = [(x, name) for name, x in module.named_modules() if callable(getattr(x, "set_context_parallel", None))]
    if not found:
        raise ValueError(
            f"module {type(module).__name__} holds no attention of this library; its own would see this rank's shard "
            "alone. Use nn.MultiheadDilatedAttention or nn.DilatedAttention in it"
        )
    for child, name in found:
        child.set_context_parallel(mesh, transport, name)
