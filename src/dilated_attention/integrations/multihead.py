"""Convert models with `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from dilated_attention import Dilated, Product, UnsupportedError
from dilated_attention.nn import MultiheadDilatedAttention
from dilated_attention.plumbing import LayoutOfLength, Pattern


def convert_attention(
    model: nn.Module,
    pattern: Pattern | LayoutOfLength | Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    segment_lengths: Sequence[int] | None = None,
    offsets: Any = "head",
    head_groups: bool = False,
    backend: str = "auto",
    choose: Callable[[str, nn.MultiheadAttention], bool] | None = None,
) -> list[str]:
    """Replace the `nn.MultiheadAttention` modules of a model with `MultiheadDilatedAttention`, in place.

    The parameters stay the same objects: an optimizer keeps working, and the state_dict keeps its keys. Afterwards
    `forward` returns weights only when called with need_weights=True.

    Args:
        pattern: as in `MultiheadDilatedAttention`; or segment_lengths, with dilation_rates next to it.
        segment_lengths, dilation_rates, offsets, head_groups: instead of a pattern, the arguments of `Dilated`.
        backend: as in `dilated_attention`.
        choose: called as choose(name, module); True: replace the module. Default: replace all except the
            cross-attention of `nn.TransformerDecoderLayer`.

    Returns:
        The names of the replaced modules.

    Raises:
        ValueError: a module cannot be replaced, or there is none. The message names the module, and nothing has been
            replaced.

    Examples:
        >>> from dilated_attention import Window
        >>> from dilated_attention.integrations import convert_attention
        >>> model = torch.nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, batch_first=True)
        >>> convert_attention(model, Window(16))
        ['self_attn']
        >>> model(torch.randn(1, 100, 32)).shape
        torch.Size([1, 100, 32])
    """
    if isinstance(model, nn.MultiheadAttention):
        raise ValueError(
            "model is itself an nn.MultiheadAttention, and cannot be replaced inside itself; make a "
            f"MultiheadDilatedAttention of the same arguments, with batch_first={model.batch_first}, and load its "
            "state_dict"
        )
    if dilation_rates is not None and segment_lengths is None:
        segment_lengths, pattern = pattern, None  # type: ignore[assignment]
    options = {
        "pattern": pattern, "segment_lengths": segment_lengths, "dilation_rates": dilation_rates, "offsets": offsets,
        "head_groups": head_groups, "backend": backend,
    }  # fmt: skip
    made: dict[nn.MultiheadAttention, MultiheadDilatedAttention] = {}
    places: list[tuple[nn.Module, str, nn.MultiheadAttention]] = []
    names = []
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():
            if not isinstance(child, nn.MultiheadAttention):
                continue
            full = f"{path}.{name}".lstrip(".")
            crosses = isinstance(parent, nn.TransformerDecoderLayer) and name == "multihead_attn"
            if crosses if choose is None else not choose(full, child):
                continue
            if child not in made:
                try:
                    made[child] = _dilated(child, options)
                except ValueError as error:
                    raise type(error)(f"{full}: {error}") from error
            places.append((parent, name, child))
            names.append(full)
    if not names:
        raise ValueError(f"{type(model).__name__} has no nn.MultiheadAttention to replace; nothing was changed")
    for parent, name, child in places:
        setattr(parent, name, made[child])
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # in eval it packs padded batches for a fused dense layer
    return names


def _dilated(theirs: nn.MultiheadAttention, options: dict[str, Any]) -> MultiheadDilatedAttention:
    if type(theirs) is not nn.MultiheadAttention:
        raise UnsupportedError(f"{type(theirs).__name__} may compute more than nn.MultiheadAttention; leave it out")
    if any(hooks for name, hooks in vars(theirs).items() if name.endswith("_hooks")):
        raise UnsupportedError("it has hooks, which would be lost; remove them first")
    ours = MultiheadDilatedAttention(
        theirs.embed_dim,
        theirs.num_heads,
        theirs.dropout,
        bias=theirs.in_proj_bias is not None,
        add_bias_kv=theirs.bias_k is not None,
        add_zero_attn=theirs.add_zero_attn,
        kdim=theirs.kdim,
        vdim=theirs.vdim,
        batch_first=theirs.batch_first,
        device="meta",
        **options,
    )
    pattern = ours.attention.pattern
    pattern = pattern.dilated if isinstance(pattern, Product) else pattern
    if isinstance(pattern, Dilated):
        pattern.offset_table(theirs.num_heads)
    ours.out_proj = theirs.out_proj
    for name, parameter in theirs.named_parameters(recurse=False, remove_duplicate=False):
        setattr(ours, name, parameter)
    return ours.train(theirs.training)
