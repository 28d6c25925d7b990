"""Load weights of other implementations: torchscale's LongNet, Prov-GigaPath, LongViT.

Files are never unpickled (`weights_only=True`). A model is never loaded partially: an error lists the weights that
are missing, surplus or of the wrong shape. Channels of xPos are reordered, since torchscale rotates neighbours (2i, 2i
+ 1) and this library rotates halves (i, i + head_dim / 2); scores are sums over channels, and do not change.
"""

from __future__ import annotations

import math
import pickle
import re
import struct
import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from dilated_attention import Dilated
from dilated_attention.models.configuration import LongNetConfig
from dilated_attention.models.gigapath import PATTERN, GigaPathConfig, GigaPathSlideEncoder
from dilated_attention.models.longnet import LongNetAttention, LongNetEncoder, LongNetLM
from dilated_attention.models.longvit import RATES, SEGMENTS, LongViT, LongViTConfig
from dilated_attention.models.pretrained import Pretrained
from dilated_attention.plumbing import storage

Source = Mapping[str, Any] | str | Path
Architecture = Literal["attention", "encoder", "decoder"]
Compat = Literal["torchscale"] | None
Model = TypeVar("Model", bound=Pretrained)
ARCHITECTURES = ("attention", "encoder", "decoder")
WRAPPERS = ("model", "state_dict", "module", "teacher", "student")
"""The names of the entries under which training scripts put a state_dict into their files."""

_WRAPPED = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
"""The parts that torch.compile, FSDP, activation checkpointing and data parallelism add to the names of weights."""
_ROOTS = {"layers", "q_proj", "patch_embed"}
"""The first parts of weight names by which a known model is recognised."""
_HALVES = {"encoder", "decoder", "model"}
"""The first parts of weight names in larger models, which hold a known one."""

PICKLE_ERRORS = (
    *(pickle.UnpicklingError, struct.error, EOFError, RuntimeError, OverflowError, MemoryError),
    *(AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError),
)
"""The errors that reading damaged bytes as a pickle may raise."""


def read_checkpoint(source: Source, prefix: str = "") -> dict[str, Tensor]:
    """Read tensors from a state_dict, a safetensors file, or a file written by `torch.save` (with `weights_only`).

    If the file holds the state_dict under an entry such as `model`, `state_dict` or `module`, it is taken from there.

    Args:
        prefix: take only the tensors whose names begin with it, such as `"LongNet_encoder."`, and strip it from the
            names.

    Raises:
        ValueError: the file is missing, damaged or truncated, holds anything other than floating-point tensors and
            scalars, or has no name with the prefix; or a tensor is sparse, or an expanded view of fewer stored values.

    Examples:
        >>> from dilated_attention.models import read_checkpoint
        >>> state = {"encoder.weight": torch.zeros(2), "head.weight": torch.zeros(3)}  # or the path of a file
        >>> list(read_checkpoint(state, prefix="encoder."))
        ['weight']
    """
    where = "state_dict"
    held: Any = source
    if isinstance(source, (str, Path)):
        where = str(source)
        held = _read_file(Path(source))
    if not isinstance(held, Mapping):
        raise ValueError(f"{where}: expected a state_dict, names to tensors; got {type(held).__name__}")
    for name in WRAPPERS:
        if isinstance(held.get(name), Mapping):
            held = held[name]
            break

    wrong = [f"{name} ({type(x).__name__})" for name, x in held.items() if not isinstance(x, Tensor)]
    if wrong:
        raise ValueError(f"{where}: not plain tensors: {_some(wrong)}; save the model's state_dict alone")
    unheld = [str(name) for name, x in held.items() if not _is_held(x)]
    if unheld:
        raise ValueError(
            f"{where}: sparse, nested, on no device, or expanded beyond what is stored: {_some(unheld)}; save the "
            "model's state_dict alone, its tensors contiguous"
        )
    strange = [f"{name} ({x.dtype})" for name, x in held.items() if not x.is_floating_point() and x.dim()]
    if strange:
        raise ValueError(f"{where}: weights must be floating-point; got {_some(strange)}")

    found = {str(name).removeprefix(prefix): x.detach() for name, x in held.items() if str(name).startswith(prefix)}
    if prefix and not found:
        parts = sorted(_first_parts(held))
        raise ValueError(f"prefix={prefix!r}: no name in {where} begins so; they begin with {_some(parts)}")
    return found


def read_weights(source: Source, prefix: str = "") -> dict[str, Tensor]:
    """Read a checkpoint with `read_checkpoint(source, prefix)`, and change its names to those that the loaders know.

    Strips what torch.compile and data parallelism add to names. A prefix that all names share, as in one half of a
    larger model, is stripped too if a known name follows it.

    Examples:
        >>> from dilated_attention.models import read_weights
        >>> list(read_weights({"module._orig_mod.layers.0.fc1.weight": torch.zeros(2)}))  # DDP and torch.compile
        ['layers.0.fc1.weight']
    """
    held = read_checkpoint(source, prefix)
    tensors = {_WRAPPED.sub("", name): x for name, x in held.items()}
    if len(tensors) < len(held):
        raise ValueError(f"the checkpoint holds weights twice, wrapped and not; give prefix=. It has {_begin(held)}")

    stripped = tensors
    while len(parts := _first_parts(stripped)) == 1 and not parts & {*_ROOTS, ""}:
        stripped = {name.partition(".")[2]: x for name, x in stripped.items()}
    if parts & {*_ROOTS, *_HALVES}:
        return stripped
    return tensors


def _first_parts(names: Iterable[Any]) -> set[str]:
    """Return what the names have before their first dot."""
    return {str(name).partition(".")[0] for name in names}


def _read_file(path: Path) -> Any:
    storage.require_file(path)
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    # A safetensors file begins with a length of 8 bytes, the first of which may look like a pickle's, and its header.
    if start[8:] == b"{" or (start[:1] != b"\x80" and start[:4] != b"PK\x03\x04"):
        return storage.read_tensors(path)[0]
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the format: the file is read or refused
            # An open file, because for a path torch decides by its name and by its mmap defaults.
            with torch.serialization.safe_globals([Namespace]):  # a command's options, which training scripts save too
                return torch.load(file, map_location="cpu", mmap=False, weights_only=True)
    except PICKLE_ERRORS as error:
        raise ValueError(
            f"{path}: damaged, or a pickle of more than plain tensors, which is never run ({_reason(error)}); "
            "save the model's state_dict alone"
        ) from error


def _reason(error: Exception) -> str:
    """Return why PyTorch refused a pickle: the global or operand that it names, or its error's first line. Colour codes
    are removed."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    found = re.search(r"(?:GLOBAL|Unsupported class|Unsupported operand)\s+(\S+)", text)
    if found:
        return f"it holds {found[1]}"
    lines = text.splitlines()
    return lines[0] if lines else type(error).__name__


def _is_held(x: Tensor) -> bool:
    """Return whether every element is stored: a small file may otherwise expand one number to any amount of memory."""
    plain = x.layout == torch.strided and not x.is_nested and not x.is_meta
    return plain and x.untyped_storage().nbytes() >= x.numel() * x.element_size()


def _some(names: Sequence[str], most: int = 8) -> str:
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f", ... ({len(names)} in all)"
    return text


class _Taken:
    """Take a model's `weights` from a checkpoint's `tensors`; note the names of `missing` and `misshapen` ones.

    Names in `weights` are the model's; names in `tensors`, `missing` and `misshapen` are the checkpoint's. source,
    prefix: as in `read_checkpoint`.
    """

    def __init__(self, source: Source, prefix: str) -> None:
        self.tensors = read_weights(source, prefix)
        self.owned = not isinstance(source, Mapping)  # read from a file: nobody else holds them
        self.weights: dict[str, Tensor] = {}
        self.names: set[str] = set()
        self.storages: set[int] = set()  # those handed out: two parameters must not lie in one
        self.missing: list[str] = []
        self.misshapen: list[str] = []

    def take(self, name: str, *shape: int) -> Tensor:
        self.names.add(name)
        if name not in self.tensors:
            self.missing.append(name)
        elif self.tensors[name].shape != shape:
            self.misshapen.append(f"{name} {tuple(self.tensors[name].shape)} for {shape}")
        else:
            found = self.tensors[name]
            storage = found.untyped_storage().data_ptr()
            alone = self.owned and storage not in self.storages
            self.storages.add(storage)
            return found if alone else found.clone()
        return torch.empty(shape, device="meta")  # until `fill`

    def layer(self, ours: str, theirs: str, *shape: int) -> None:
        """Take the weight, of this shape, and the bias of a linear layer or a norm."""
        self.weights[f"{ours}.weight"] = self.take(f"{theirs}.weight", *shape)
        self.weights[f"{ours}.bias"] = self.take(f"{theirs}.bias", shape[0])

    def fill(self, model: Model, what: str, surplus: str) -> Model:
        """Return the model, called `what` in errors, with these weights and in evaluation mode.

        Raises a ValueError that lists missing and misshapen weights, and surplus ones, which the model does not use.
        With `surplus="warn"`, a checkpoint whose only fault is surplus weights gives a warning instead.
        """
        more = sorted(self.tensors.keys() - self.names)
        if more and surplus == "warn" and not self.missing and not self.misshapen:
            warnings.warn(f"not loaded, {what} has no place for them: {_some(more)}", stacklevel=3)
            more = []
        found = {"missing": self.missing, "surplus": more, "of another shape": self.misshapen}
        if any(found.values()):
            raise ValueError(
                f"the checkpoint does not fit {what}: "
                + "; ".join(f"{word}: {_some(names)}" for word, names in found.items() if names)
            )
        model.load_state_dict(self.weights, assign=True)
        return model.eval()


def load_torchscale(
    source: Source,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    num_heads: int | None = None,
    architecture: Architecture | None = None,
    compat: Compat = "torchscale",
    norm_eps: float = 1e-5,
    prefix: str = "",
    surplus: Literal["refuse", "warn"] = "refuse",
    backend: str = "auto",
) -> LongNetAttention | LongNetEncoder | LongNetLM:
    """Load weights of torchscale's `DilatedAttention`, `LongNetEncoder` or `LongNetDecoder` into a new model, in
    evaluation mode.

    Widths, layers, sub-LN and xPos are read from the weights. The model computes pre-norm and gelu, torchscale's
    defaults. A checkpoint with neither sub-LN nor a final norm is considered post-norm and is refused.

    Args:
        source: a state_dict, or a path to a safetensors file or one written by `torch.save`.
        segment_lengths, dilation_rates: torchscale's `segment_length` and `dilated_ratio`, which the weights do not
            contain.
        num_heads: the number of attention heads; with xPos it is read from the weights.
        architecture: the model to make, `"attention"`, `"encoder"` or `"decoder"`; None: recognise it from the names.
            embed_tokens with output_projection mean a decoder, other layers an encoder. For an encoder with
            embed_tokens and output_projection, give `"encoder"` and surplus=`"warn"`: the encoder has no place for the
            projection.
        compat: `"torchscale"`: compute what torchscale computes with these weights, attended padding included. None:
            compute exact attention, with offsets="head_block", as the weights were trained.
        norm_eps: epsilon of the model's LayerNorms.
        prefix: the beginning of the names if the weights are part of a larger model's, such as `"LongNet_encoder."`.
        surplus: `"warn"`: skip weights that the model does not use, with a warning.

    Raises:
        ValueError: the file is damaged or holds anything other than tensors; or weights are missing, surplus or of the
            wrong shape, and the message lists them all.

    Examples:
        >>> from dilated_attention.models import load_torchscale
        >>> parts, sizes = ("q_proj", "k_proj", "v_proj", "out_proj"), {"weight": (32, 32), "bias": (32,)}
        >>> weights = {f"{part}.{name}": torch.randn(*shape) for part in parts for name, shape in sizes.items()}
        >>> layer = load_torchscale(weights, segment_lengths=[16, 64], dilation_rates=[1, 4], num_heads=4)
        >>> layer(torch.randn(1, 100, 32)).shape
        torch.Size([1, 100, 32])
    """
    if architecture not in (*ARCHITECTURES, None):
        raise ValueError(f"architecture={architecture!r}: must be one of {', '.join(ARCHITECTURES)}, or None")
    pattern = _pattern(segment_lengths, dilation_rates)
    taken = _Taken(source, prefix)
    if architecture is None:
        architecture = _recognised(taken.tensors)
    what = f"torchscale's {architecture}"

    options: dict[str, Any] = {"pattern": pattern, "compat": compat, "norm_eps": norm_eps}
    model: LongNetAttention | LongNetEncoder | LongNetLM
    if architecture == "attention":
        config = _attention_config(taken, "", num_heads, options)
        _attention(taken, "attention.", "", config)
        model = LongNetAttention.empty(config, backend=backend)
    else:
        config = _stack_config(taken, "", num_heads, options)
        is_decoder = architecture == "decoder"
        if is_decoder and config.vocab_size is None:
            raise ValueError(f"the checkpoint does not fit {what}: missing: embed_tokens.weight")
        _stack(taken, "", "", config, output=is_decoder)
        kind = LongNetLM if is_decoder else LongNetEncoder
        model = kind.empty(config, backend=backend)
    return taken.fill(model, what, surplus)


def load_gigapath(
    source: Source,
    *,
    num_heads: int = 16,
    segment_lengths: Sequence[int] = PATTERN.segment_lengths,
    dilation_rates: Sequence[int] = PATTERN.dilation_rates,
    compat: Compat = "torchscale",
    global_pool: bool = False,
    slide_ngrids: int = 1000,
    tile_size: int = 256,
    prefix: str = "",
    surplus: Literal["refuse", "warn"] = "refuse",
    backend: str = "auto",
) -> GigaPathSlideEncoder:
    """Load Prov-GigaPath's slide encoder (`slide_encoder.pth`), of any width.

    Other arguments, and errors, are as in `load_torchscale` and `GigaPathConfig`.

    The segment lengths are those that the released code computes for max_wsi_size=262144 and tile_size=256. If the file
    holds a fixed table of positions, only its shape is checked: the model computes its own.
    """
    taken = _Taken(source, prefix)
    options: dict[str, Any] = {"pattern": _pattern(segment_lengths, dilation_rates), "compat": compat}
    encoder = _stack_config(taken, "encoder.", num_heads, options)
    dim = encoder.embed_dim
    channels = taken.tensors.get("patch_embed.proj.weight", torch.empty(0, 1)).shape[-1]

    _stack(taken, "encoder.", "encoder.", encoder)
    taken.weights["cls"] = taken.take("cls_token", 1, 1, dim).flatten()
    taken.layer("projection", "patch_embed.proj", dim, channels)
    taken.layer("norm", "norm", dim)
    if "pos_embed" in taken.tensors:
        taken.take("pos_embed", 1, slide_ngrids**2 + 1, dim)

    config = GigaPathConfig(
        in_chans=channels, slide_ngrids=slide_ngrids, tile_size=tile_size, global_pool=global_pool, encoder=encoder
    )
    return taken.fill(GigaPathSlideEncoder.empty(config, backend=backend), "GigaPath's slide encoder", surplus)


def load_longvit(
    source: Source,
    *,
    num_heads: int = 16,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] = RATES,
    compat: Compat = "torchscale",
    prefix: str = "",
    surplus: Literal["refuse", "warn"] = "refuse",
    backend: str = "auto",
) -> LongViT:
    """Load torchscale's LongViT, pretrained or with a classifier. Other arguments, and errors, are as in
    `load_torchscale`.

    Args:
        segment_lengths: the segment lengths; None: the released ones for the image size, which is read from the
            weights.
    """
    taken = _Taken(source, prefix)
    tensors = taken.tensors
    part = "model." if "model.pos_embed" in tensors else ""  # a classifier's backbone is `model`
    missing = [name for name in (f"{part}patch_embed.proj.weight", f"{part}pos_embed") if name not in tensors]
    if missing:
        raise ValueError(
            f"the checkpoint does not fit LongViT: missing: {_some(missing)}; its names: {_begin(tensors)}"
        )

    kernel = tensors[f"{part}patch_embed.proj.weight"]
    table = tensors[f"{part}pos_embed"]
    side = math.isqrt(table.shape[-2]) if table.dim() == 3 else 0
    fits_kernel = kernel.dim() == 4 and kernel.shape[2] == kernel.shape[3]
    fits_table = side > 0 and side * side == table.shape[-2]
    if not fits_kernel or not fits_table:
        raise ValueError(
            "the checkpoint does not fit LongViT: of another shape: "
            f"{part}patch_embed.proj.weight {tuple(kernel.shape)}, {part}pos_embed {tuple(table.shape)}"
        )
    _, in_chans, patch_size, _ = kernel.shape
    image_size = side * patch_size
    if segment_lengths is None:
        if image_size not in SEGMENTS:
            raise ValueError(f"image size {image_size}: not of a released model; give segment_lengths")
        segment_lengths = SEGMENTS[image_size]

    options: dict[str, Any] = {"pattern": _pattern(segment_lengths, dilation_rates), "compat": compat}
    encoder = _stack_config(taken, f"{part}encoder.", num_heads, options)
    dim = encoder.embed_dim
    _stack(taken, "encoder.", f"{part}encoder.", encoder)
    taken.layer("patches", f"{part}patch_embed.proj", dim, *kernel.shape[1:])
    taken.weights["positions"] = taken.take(f"{part}pos_embed", 1, side * side, dim)[0]
    classes: int | None = None
    if "head.weight" in tensors:
        classes = tensors["head.weight"].shape[0]
        taken.layer("norm", "fc_norm", dim)
        taken.layer("head", "head", classes, dim)

    config = LongViTConfig(
        image_size=image_size, patch_size=patch_size, in_chans=in_chans, num_classes=classes, encoder=encoder
    )
    return taken.fill(LongViT.empty(config, backend=backend), "LongViT", surplus)


def _pattern(segment_lengths: Sequence[int], dilation_rates: Sequence[int]) -> Dilated:
    """Return a pattern with offsets="head_block". The weights were trained with these offsets, so they are used even if
    compat is None."""
    return Dilated(segment_lengths, dilation_rates, "head_block")  # type: ignore[arg-type]


def _begin(tensors: Mapping[str, Tensor]) -> str:
    return _some(sorted(tensors), 4) or "none"


def _recognised(tensors: Mapping[str, Tensor]) -> Architecture:
    def has(beginning: str) -> bool:
        return any(name.startswith(beginning) for name in tensors)

    if "q_proj.weight" in tensors:
        return "attention"
    if has("encoder.layers.") and has("decoder.layers."):
        raise ValueError(
            "the checkpoint is of an encoder-decoder, which is not supported; give the prefix of its encoder's names "
            'to load that half, such as prefix="encoder."'
        )
    if has("layers."):
        is_decoder = "embed_tokens.weight" in tensors and "output_projection.weight" in tensors
        return "decoder" if is_decoder else "encoder"
    raise ValueError(
        f"the checkpoint is of no LongNet of torchscale: no layers.* and no q_proj.weight; its names: {_begin(tensors)}"
    )


def _attention_config(taken: _Taken, prefix: str, num_heads: int | None, options: dict[str, Any]) -> LongNetConfig:
    """Return the configuration that one attention's weights, named `prefix` + ..., imply.

    num_heads: None only with xPos, whose weights tell it. options: the `LongNetConfig` fields that weights do not tell.
    """
    weight = taken.tensors.get(f"{prefix}q_proj.weight")
    scale = taken.tensors.get(f"{prefix}xpos.scale")
    if weight is None or weight.dim() != 2:
        raise ValueError(
            f"the checkpoint is of no LongNet of torchscale: no matrix {prefix}q_proj.weight; its names: "
            f"{_begin(taken.tensors)}"
        )

    dim = weight.shape[0]
    if scale is not None:
        heads = dim // (2 * len(scale))
        if num_heads not in (None, heads):
            raise ValueError(f"num_heads={num_heads}: {prefix}xpos.scale has {len(scale)} entries, of {heads} heads")
        num_heads = heads
    if num_heads is None:
        raise ValueError("num_heads: the weights do not tell; give the number of attention heads")

    return LongNetConfig(
        vocab_size=None,
        embed_dim=dim,
        num_layers=1,
        num_heads=num_heads,
        positions=None if scale is None else "xpos",
        sub_ln=f"{prefix}inner_attn_ln.weight" in taken.tensors,
        bias=True,
        **options,
    )


def _stack_config(taken: _Taken, prefix: str, num_heads: int | None, options: dict[str, Any]) -> LongNetConfig:
    """Return the configuration that a stack's weights imply. Arguments are as in `_attention_config`."""
    config = _attention_config(taken, f"{prefix}layers.0.self_attn.", num_heads, options)
    of_layer = re.compile(re.escape(prefix) + r"layers\.(\d+)\.")
    layers = {int(found[1]) for name in taken.tensors if (found := of_layer.match(name))}
    hidden = taken.tensors.get(f"{prefix}layers.0.ffn.fc1.weight", torch.empty(4 * config.embed_dim, 0))
    words = taken.tensors.get(f"{prefix}embed_tokens.weight")
    output = taken.tensors.get(f"{prefix}output_projection.weight")
    final_norm = f"{prefix}layer_norm.weight" in taken.tensors
    if not final_norm and not config.sub_ln:
        raise ValueError(
            f"the checkpoint has neither sub-LN nor {prefix}layer_norm.weight: it is of a post-norm model, "
            "which is not supported"
        )
    tied = output is None or (words is not None and output.shape == words.shape and torch.equal(output, words))
    return replace(
        config,
        vocab_size=None if words is None else words.shape[0],
        num_layers=max(layers) + 1,
        mlp_dim=hidden.shape[0],
        final_norm=final_norm,
        tie_embeddings=tied,
    )


def _attention(taken: _Taken, ours: str, theirs: str, config: LongNetConfig) -> None:
    """Take torchscale's weights named `theirs` + ... as those of a `SelfAttention` named `ours` + ..."""
    dim = config.embed_dim
    kinds = ("q", "k", "v", "out")
    found = {
        "weight": {kind: taken.take(f"{theirs}{kind}_proj.weight", dim, dim) for kind in kinds},
        "bias": {kind: taken.take(f"{theirs}{kind}_proj.bias", dim) for kind in kinds},
    }
    if config.positions == "xpos":
        half = config.head_dim // 2
        scale = taken.take(f"{theirs}xpos.scale", half)
        expected = (torch.arange(half) / half + 0.4) / 1.4
        if not scale.is_meta and not torch.allclose(scale.float(), expected, rtol=1e-2):
            raise ValueError(f"{theirs}xpos.scale is not (2i / head_dim + 0.4) / 1.4; got {scale.tolist()}")
        for x in found.values():
            x["q"] = _halves(x["q"], config.head_dim)
            x["k"] = _halves(x["k"], config.head_dim)
    for part, x in found.items():
        taken.weights[f"{ours}input.{part}"] = _cat([x["q"], x["k"], x["v"]])
        taken.weights[f"{ours}output.{part}"] = x["out"]
    if config.sub_ln:
        taken.layer(f"{ours}norm", f"{theirs}inner_attn_ln", dim)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate weights along the rows. If one is on the meta device, which marks it as missing, so is the result."""
    if any(x.is_meta for x in parts):
        parts = [x.to("meta") for x in parts]
    return torch.cat(list(parts))


def _halves(x: Tensor, head_dim: int) -> Tensor:
    """Reorder rows: rows 2i of each head first, then rows 2i + 1. torchscale rotates channels (2i, 2i + 1) together,
    `nn.rotate` channels (i, i + head_dim / 2)."""
    return x.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _stack(taken: _Taken, ours: str, theirs: str, config: LongNetConfig, *, output: bool = False) -> None:
    """Take torchscale's weights named `theirs` + ... as those of a `LongNetStack` named `ours` + ...

    output: with a vocabulary, take the output projection too, or only accept its name if it is tied to the embedding.
    """
    dim = config.embed_dim
    width = config.mlp_width
    for i in range(config.num_layers):
        block = f"{ours}blocks.{i}"
        layer = f"{theirs}layers.{i}"
        _attention(taken, f"{block}.attention.", f"{layer}.self_attn.", config)
        taken.layer(f"{block}.attention_norm", f"{layer}.self_attn_layer_norm", dim)
        taken.layer(f"{block}.mlp_norm", f"{layer}.final_layer_norm", dim)
        taken.layer(f"{block}.mlp.0", f"{layer}.ffn.fc1", width, dim)
        taken.layer(f"{block}.mlp.2", f"{layer}.ffn.fc2", dim, width)
        if config.sub_ln:
            taken.layer(f"{block}.mlp.1.1", f"{layer}.ffn.ffn_layernorm", width)
    if config.final_norm:
        taken.layer(f"{ours}norm", f"{theirs}layer_norm", dim)
    if config.vocab_size is not None:
        taken.weights[f"{ours}embedding.weight"] = taken.take(f"{theirs}embed_tokens.weight", config.vocab_size, dim)
        if output:
            name = f"{theirs}output_projection.weight"
            if not config.tie_embeddings:
                taken.weights[f"{ours}output.weight"] = taken.take(name, config.vocab_size, dim)
            taken.names.add(name)
