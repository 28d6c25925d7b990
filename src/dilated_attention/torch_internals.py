"""Collect the private names of PyTorch that this library uses, each with its reason.

`tests/test_torch_internals.py` checks that they exist and do what is said here. The oldest supported PyTorch has no
public names for these purposes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from operator import index
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import DeviceMesh, ProcessGroup, Store

from dilated_attention.errors import UnsupportedError

Function = TypeVar("Function", bound=Callable[..., Any])

BelowAutograd: Any = torch._C._AutoDispatchBelowAutograd
"""A context in which operators skip their Autograd kernels, so that an Autograd kernel can call its own operator."""

unobserved: Any = torch.utils._python_dispatch._disable_current_modes
"""A context in which no dispatch mode sees operators, so that new tensors hold numbers while torch.export traces."""

untransformed: Any = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack
"""A context in which no transform of torch.func wraps new tensors, or refuses to draw random numbers."""

without_overrides: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which no argument's `__torch_function__` is asked."""

taken_as_true: Any = torch._check
"""A function that tells a graph's compiler what holds of a number that it does not know."""

flash_for_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_for_cpu_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
efficient: Any = torch.ops.aten._scaled_dot_product_efficient_attention
efficient_backward: Any = torch.ops.aten._scaled_dot_product_efficient_attention_backward
"""The operators behind `scaled_dot_product_attention`, which itself neither returns an lse nor takes a merged one."""


def constant_when_traced(function: Function) -> Function:
    """Mark `function` so that `torch.compile` calls it while tracing and keeps its result as a constant of the graph,
    as `torch.compiler.assume_constant_result` does, which imports the whole compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def fixed(value: Any) -> Any:
    """Return a number, or a list or tuple of them, with symbols of `torch.compile` as constants of its graph. A
    function that is `constant_when_traced` takes no symbols."""
    if isinstance(value, (list, tuple)):
        return type(value)([fixed(x) for x in value])
    if isinstance(value, float):
        return value.__float__()
    if isinstance(value, int) and not isinstance(value, bool):
        return index(value)
    return value


def in_export() -> bool:
    """Return whether torch.export records a graph."""
    return torch.compiler._is_exporting_flag  # PyTorch 2.10 takes is_exporting() for true in every graph


def is_symbol(size: int) -> bool:
    """Return whether a size is a symbol of a graph that torch.export records, which may have another value when it
    runs."""
    if not in_export():
        return False
    from torch.fx.experimental import symbolic_shapes

    if not hasattr(symbolic_shapes, "guarding_hint_or_throw"):  # before PyTorch 2.13: taken for one
        return True
    hint = symbolic_shapes.guarding_hint_or_throw(size)
    return not symbolic_shapes.statically_known_true(size == hint)


def not_traced(function: Function) -> Function:
    """Wrap `function` in `torch.compiler.disable` once the compiler is loaded. Until then, calls are direct."""
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if disabled:
            return disabled[0](*arguments, **options)
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **options)
        disabled[:] = [torch.compiler.disable(function)]  # not `append`: PyTorch 2.11
        return disabled[0](*arguments, **options)

    return call  # type: ignore[return-value]


def in_torch_func() -> bool:
    """Return whether a torch.func transform is active. It differentiates `autograd.Function`s, not Autograd kernels."""
    return torch._C._are_functorch_transforms_active()


def is_mapped(x: Tensor) -> bool:
    """Return whether `torch.func.vmap` maps a tensor: its values differ between elements, and cannot be read."""
    # In vmap of grad, grad has wrapped it once more. (Compiled graphs know is_batchedtensor alone.)
    while not torch.compiler.is_compiling() and torch._C._functorch.is_gradtrackingtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return torch._C._functorch.is_batchedtensor(x)


def of_all_elements(x: Tensor) -> Tensor:
    """Return what torch.func has wrapped: its values can be read, and a dimension that vmap maps is one of its own."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def in_forward_mode() -> bool:
    """Return whether forward-mode derivatives are computed, which an operator without a rule for them silently
    drops."""
    return forward_ad._current_level >= 0


def in_batched_gradients(*gradients: Tensor | None) -> bool:
    """Return whether autograd itself maps over gradients (`is_grads_batched`, `jacobian(vectorize=True)`). It uses
    an older vmap than torch.func, which ignores our rules."""
    return any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in gradients)


def autograd_position() -> tuple[int, int | None]:
    """Return autograd's next sequence number, and inside a backward the number of the node that runs: while activation
    checkpointing recomputes a forward, a node of the forward that is repeated."""
    number = torch._C._autograd._get_sequence_nr()
    node = torch._C._current_autograd_node()
    if node is None:
        return number, None
    return number, node._sequence_nr()


def hooked(*modules: nn.Module) -> bool:
    """Return whether code of others runs when a module, or a module inside it, is called: a forward hook, a hook for
    all modules, or a forward of the instance's own, as accelerate sets it."""
    if torch.nn.modules.module._has_any_global_hook():
        return True
    for module in modules:
        for x in module.modules():
            if x._forward_hooks or x._forward_pre_hooks or "forward" in x.__dict__:
                return True
    return False


def observed(*tensors: Tensor | None) -> bool:
    """Return whether operators of eager code may not be skipped: for a dispatch mode (fake tensors, selective
    checkpointing, counters of FLOPs), a subclass of Tensor, or a tensor whose memory holds the negated numbers."""
    for x in tensors:
        if x is not None and (type(x) is not Tensor or x.is_neg()):
            return True
    return torch._C._len_torch_dispatch_stack() > 0


def on_default_stream(x: Tensor) -> bool:
    """Return whether the current stream of x's CUDA device is its default one, without making a `Stream`."""
    return torch._C._cuda_getCurrentRawStream(x.get_device()) == 0


def mapped_indices() -> AbstractContextManager[None]:
    """Let `torch.vmap` map `table[i]` where i is one number, as FlexAttention needs when it maps a mask_mod. PyTorch
    2.10 reads the value of i, which vmap does not allow."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # half a second to import

    return TransformGetItemToIndex()


def in_autocast(x: Tensor) -> bool:
    """Return whether autocast is on for the device of x."""
    if x.is_cpu:  # asked first: a device takes long to say its type
        return torch.is_autocast_enabled("cpu")
    if x.is_cuda:
        return torch.is_autocast_enabled("cuda")
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast on the device of x."""
    if in_autocast(x):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


def require_when_run(condition: Tensor, message: str) -> None:
    """Raise a RuntimeError with this message unless `condition`, a single boolean tensor, is true: when the compiled
    graph runs, or when the device reaches this operation."""
    torch._assert_async(condition, message)


def require_true(condition: Tensor, message: str) -> None:
    """Raise UnsupportedError with this message unless `condition`, a single boolean tensor, is true. A compiled graph
    raises RuntimeError instead, when it runs."""
    if torch.compiler.is_compiling():
        require_when_run(condition, message)
    elif not of_all_elements(condition).all():
        raise UnsupportedError(message)


def group_named(name: str) -> ProcessGroup:
    """Return a process group by its name, which an operator's schema can hold."""
    group: ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return group


def rendezvous_store() -> Store:
    """Return the store through which the default process group was formed."""
    return dist.distributed_c10d._get_default_store()


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh with a single axis, named after all axes ("data_context"), over all ranks of a mesh of several."""
    return mesh._flatten()
