"""Run a whole model over a mesh."""

from __future__ import annotations

import inspect

from torch import nn

from dilated_attention.parallel.sharding import Mesh, context_group


def set_context_parallel(
    module: nn.Module, mesh: Mesh | None, transport: str = "auto", *, seq_len: int | None = None
) -> None:
    """Run every attention of `module` over `mesh`, on which its sequences are sharded; None: back to one device.

    Each module that takes part has its own method `set_context_parallel(mesh, transport, layer)`: the attention modules
    of this library, models whose positions or losses depend on where a shard lies, and, once
    `integrations.huggingface` is imported, the models of transformers. Errors name the layer.

    Args:
        seq_len: the global length of sequences with uneven shards, for attention that is called without one, as inside
            `nn.TransformerEncoder`. For a transformers model, the length that every batch must have; None: any.

    Raises:
        ValueError: nothing in `module` takes part, so its attention would see only a shard.
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
        if "seq_len" in inspect.signature(child.set_context_parallel).parameters:
            child.set_context_parallel(mesh, transport, name, seq_len=seq_len)
            continue
        child.set_context_parallel(mesh, transport, name)
        if hasattr(child, "seq_len"):
            child.seq_len = seq_len
