"""Describe models by configurations: frozen, checked when they are made, written to JSON and read without `eval`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from dilated_attention import Dilated, Sum, Window
from dilated_attention.nn import BlockAttentionMixture, IndexedAttention, NativeSparseAttention, Rotary
from dilated_attention.plumbing import checks

Some = TypeVar("Some", bound="Configuration")


class Configuration:
    """Write the fields of a frozen dataclass as JSON, and read them.

    A subclass is the dataclass, and may set three class variables. The fields in `nested` are objects in the JSON text,
    or null; each is mapped to the object's dataclass, or to a function (fields, where) that makes it from its dict of
    fields; `where` begins its error messages. Fields in `newer` may be missing, as in files of earlier versions, and
    then have their defaults, which reproduce what those versions did. `presets` holds the fields of published
    configurations by name.
    """

    nested: ClassVar[Mapping[str, Any]] = {}
    newer: ClassVar[frozenset[str]] = frozenset()
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"  # type: ignore[call-overload]

    @classmethod
    def from_json(cls: type[Some], text: str) -> Some:
        """Read a configuration. Raises ValueError if the text is not JSON, or a field is unknown, missing or of a wrong
        type."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"configuration: not JSON ({error})") from error
        return _made(cls, fields, "configuration")

    @classmethod
    def preset(cls: type[Some], name: str, **changes: Any) -> Some:
        """Return a published configuration by name, with `changes` to its fields. `presets` holds the names."""
        if name not in cls.presets:
            raise ValueError(f"preset={name!r}: must be one of {', '.join(cls.presets)}")
        return cls(**{**cls.presets[name], **changes})


def _made(kind: Any, fields: Any, where: str) -> Any:
    if not isinstance(kind, type):
        return kind(fields, where)
    names = {entry.name for entry in dataclasses.fields(kind)}
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: expected an object with the fields {', '.join(sorted(names))}, got {fields!r}")
    missing = names - fields.keys() - getattr(kind, "newer", {"compat"})  # the field of a pattern is newer, too
    for word, wrong in (("unknown", fields.keys() - names), ("missing", missing)):
        if wrong:
            raise ValueError(f"{where}: {word} field {', '.join(sorted(wrong))}")

    nested = getattr(kind, "nested", {})
    made = {}
    for name, value in fields.items():
        if name in nested and value is not None:
            made[name] = _made(nested[name], value, f"{where}: {name}")
        else:
            made[name] = _tuples(value)
    try:
        return kind(**made)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _pattern(fields: Any, where: str) -> Any:
    """Return a `Dilated`, a `Window`, or a sum of these, from its fields in JSON; `where` begins error messages."""
    if _has(fields, "terms"):
        terms = fields["terms"]
        if set(fields) != {"terms"} or not isinstance(terms, list) or not 2 <= len(terms) <= MOST:
            raise ValueError(f"{where}: a sum has the field terms alone, a list of 2 to {MOST:,} patterns")
        return Sum(tuple(_made(_kind(term), term, f"{where}: terms") for term in terms))
    return _made(_kind(fields), fields, where)


def _kind(fields: Any) -> type:
    return Window if _has(fields, "before") else Dilated


def _selection(fields: Any, where: str) -> Any:
    """Return a selection from its fields in JSON; `where` begins error messages."""
    if _has(fields, "index_heads"):
        return _made(IndexedKeys, fields, where)
    kind = BlockMixture if _has(fields, "top_k") else NativeSparse
    return _made(kind, fields, where)


def _has(fields: Any, name: str) -> bool:
    return isinstance(fields, dict) and name in fields


def _tuples(value: Any) -> Any:
    """Return lists, and lists inside them, as tuples; any other value as it is."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value


def require_integers(configuration: Any, *names: str, optional: tuple[str, ...] = (), most: int = 1 << 24) -> None:
    """Raise ValueError unless the named fields are positive integers up to `most` or, if optional, None."""
    for name in (*names, *optional):
        value = getattr(configuration, name)
        if value is None and name in optional:
            continue
        if type(value) is int and 0 < value <= most:
            continue
        wanted = "a positive integer"
        if type(value) is int and value > most:
            wanted += f" of at most {most:,}"
        if name in optional:
            wanted += ", or None"
        raise ValueError(f"{name}={_short(value)}: must be {wanted}")


def _short(value: Any) -> str:
    """Shorten a value for a message: a file may hold anything, of any length."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def require_number(
    configuration: Any, name: str, above: float, below: float = sys.float_info.max, *, least: bool = False
) -> None:
    """Raise ValueError unless the field is a number in (above, below), or with `least` in [above, below)."""
    value = getattr(configuration, name)
    if type(value) not in (int, float) or not (above < value < below or (least and value == above)):
        wanted = f"of at least {above}" if least else f"above {above}"
        if below != sys.float_info.max:
            wanted += f" and below {below}"
        raise ValueError(f"{name}={_short(value)}: must be a number {wanted}")


MOST = 1024
"""The most layers, heads and branches: a damaged or hostile file is refused early."""
MOST_TOKENS = 1 << 48
"""The most tokens of a segment."""


class _Selection:
    """Base class of the options of an attention module that selects its keys.

    A subclass is a dataclass of the module's integer arguments, and sets `kind`, the module's class, and `may_be_zero`,
    the names of the arguments that may be 0. New options are checked by making the module on the meta device.
    """

    kind: ClassVar[type[NativeSparseAttention | BlockAttentionMixture | IndexedAttention]]
    may_be_zero: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):  # type: ignore[arg-type]
            if entry.name not in self.may_be_zero or getattr(self, entry.name) != 0:
                require_integers(self, entry.name)
        self.module(2, 1, device="meta")

    def module(
        self, embed_dim: int, num_heads: int, num_kv_heads: int | None = None, **options: Any
    ) -> NativeSparseAttention | BlockAttentionMixture | IndexedAttention:
        """Return the module of this selection; `options` as in its constructor."""
        return self.kind(embed_dim, num_heads, num_kv_heads, **dataclasses.asdict(self), **options)  # type: ignore[call-overload]


@dataclass(frozen=True, kw_only=True)
class NativeSparse(_Selection):
    """Describe the `nn.NativeSparseAttention` of a LongNet's layers; the attributes are its arguments.

    Examples:
        >>> from dilated_attention.models import LongNetConfig, LongNetLM, NativeSparse
        >>> config = LongNetConfig(num_layers=1, embed_dim=32, num_heads=2, selection=NativeSparse(window=32))
        >>> LongNetLM(config)(torch.randint(256, (1, 100))).shape
        torch.Size([1, 100, 256])
    """

    kind = NativeSparseAttention

    compress_block: int = 32
    compress_stride: int = 16
    block_size: int = 64
    num_selected: int = 16
    local_blocks: int = 2
    window: int = 512
    query_block: int = 16


@dataclass(frozen=True, kw_only=True)
class BlockMixture(_Selection):
    """Describe the `nn.BlockAttentionMixture` of a LongNet's layers; the attributes are its arguments.

    Examples:
        >>> from dilated_attention.models import BlockMixture, LongNetConfig, LongNetLM
        >>> config = LongNetConfig(num_layers=1, embed_dim=32, num_heads=2, selection=BlockMixture(block_size=32))
        >>> LongNetLM(config)(torch.randint(256, (1, 100))).shape
        torch.Size([1, 100, 256])
    """

    kind = BlockAttentionMixture

    block_size: int = 256
    top_k: int = 4
    query_block: int = 16


@dataclass(frozen=True, kw_only=True)
class IndexedKeys(_Selection):
    """Describe the `nn.IndexedAttention` of a LongNet's layers; the attributes are its arguments.

    The indexers learn from the second of `LongNetLM.losses`, the other parameters from the first.

    Examples:
        >>> from dilated_attention.models import IndexedKeys, LongNetConfig, LongNetLM
        >>> config = LongNetConfig(num_layers=1, embed_dim=32, num_heads=2, selection=IndexedKeys(top_k=16))
        >>> loss, index_loss = LongNetLM(config).losses(torch.randint(256, (1, 100)))
        >>> (loss + index_loss).backward()
    """

    kind = IndexedAttention
    may_be_zero = frozenset({"leading", "recent"})

    top_k: int = 2048
    index_heads: int = 4
    leading: int = 0
    recent: int = 1


Selection = NativeSparse | BlockMixture | IndexedKeys

PAPER = Dilated((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
"""The branches of the LongNet paper's language models (arXiv:2307.02486, section 4.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongNetConfig(Configuration):
    """Describe a LongNet: a `LongNetEncoder` or a `LongNetLM`.

    The defaults are a small plain language model; `LongNetConfig.preset("longnet-base")` is the paper's model.

    Attributes:
        vocab_size: number of token ids, 256 for bytes; None: no embedding, the inputs are vectors.
        num_kv_heads: number of KV heads (grouped queries); None = num_heads.
        mlp_dim: width inside the MLP; None = 4 embed_dim.
        pattern: which tokens attend to which: a `Dilated`, a `Window`, or their sum; None = dense attention.
        rope_base: wavelengths of the rotary positions run from 2 pi to 2 pi rope_base tokens.
        positions: `"rope"`, `"xpos"` (rotary positions whose products decay with the distance), or None.
        xpos_scale_base: see `nn.Rotary`.
        sub_ln: use MAGNETO's LayerNorm inside attention and MLP, and its initialisation.
        bias: add a bias to every projection except the output layer.
        final_norm: add a LayerNorm after the last block.
        tie_embeddings: use a language model's embedding as its output projection.
        norm_eps: epsilon of every LayerNorm.
        dropout: dropout, in training, of what the blocks add to the residual stream.
        attention_dropout: dropout, in training, of the attention probabilities.
        selection: a `NativeSparse`, a `BlockMixture` or an `IndexedKeys`: every layer selects the keys that it sees,
            and `pattern` is None. Only for a `LongNetLM` without sub_ln, attention_dropout and compat.
        compat: `"torchscale"`: compute attention as released checkpoints do, see `Dilated`; the pattern's offsets
            `"head"` become `"head_block"`. None: exact.

    Examples:
        >>> from dilated_attention import Dilated
        >>> from dilated_attention.models import LongNetConfig
        >>> config = LongNetConfig(embed_dim=32, num_layers=2, num_heads=4, pattern=Dilated([8, 32], [1, 4]))
        >>> LongNetConfig.from_json(config.to_json()) == config
        True
        >>> LongNetConfig.preset("longnet-base").embed_dim
        768
    """

    nested: ClassVar[Mapping[str, Any]] = {"pattern": _pattern, "selection": _selection}
    newer: ClassVar[frozenset[str]] = frozenset(
        {
            *("positions", "xpos_scale_base", "sub_ln", "bias", "final_norm", "tie_embeddings", "norm_eps"),
            *("dropout", "attention_dropout", "selection", "compat"),
        }
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "longnet-base": {
            "vocab_size": 100_277,  # tiktoken's cl100k_base
            "embed_dim": 768,
            "num_layers": 12,
            "num_heads": 12,
            "pattern": PAPER,
            "positions": "xpos",
            "sub_ln": True,
            "bias": True,
            "tie_embeddings": False,
        },
    }

    vocab_size: int | None = 256
    embed_dim: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int | None = None
    mlp_dim: int | None = None
    pattern: Dilated | Window | Sum | None = field(default=Dilated((512, 2048, 8192), (1, 4, 16)))
    rope_base: float = 10_000.0
    positions: Literal["rope", "xpos"] | None = "rope"
    xpos_scale_base: float = 512.0
    sub_ln: bool = False
    bias: bool = False
    final_norm: bool = True
    tie_embeddings: bool = True
    norm_eps: float = 1e-5
    dropout: float = 0.0
    attention_dropout: float = 0.0
    selection: Selection | None = None
    compat: Literal["torchscale"] | None = None

    def __post_init__(self) -> None:
        require_integers(self, "embed_dim", optional=("vocab_size", "num_kv_heads", "mlp_dim"))
        require_integers(self, "num_layers", "num_heads", most=MOST)
        for name in ("sub_ln", "bias", "final_norm", "tie_embeddings"):
            checks.boolean(name, getattr(self, name))
        require_number(self, "rope_base", 1)
        require_number(self, "xpos_scale_base", 0)
        require_number(self, "norm_eps", 0)
        require_number(self, "dropout", 0, 1, least=True)
        require_number(self, "attention_dropout", 0, 1, least=True)
        if self.positions not in ("rope", "xpos", None):
            raise ValueError(f'positions={self.positions!r}: must be "rope", "xpos" or None')
        if self.compat not in ("torchscale", None):
            raise ValueError(f'compat={self.compat!r}: must be "torchscale" or None')

        factor = self.num_heads
        wanted = f"num_heads={factor}"
        if self.positions is not None:
            factor = 2 * self.num_heads
            wanted = f"2 x num_heads = {factor}, rotary positions turn pairs of channels"
        if self.embed_dim % factor:
            raise ValueError(f"embed_dim={self.embed_dim}: must be a multiple of {wanted}")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads}: must divide num_heads={self.num_heads}")

        if self.selection is not None:
            self._check_selection()
        self._check_pattern()
        self._settle_compat()

    def _settle_compat(self) -> None:
        """Move `compat` from the pattern to this configuration, and give the pattern the offsets that it needs."""
        pattern = self.pattern
        if isinstance(pattern, Dilated) and pattern.compat is not None:
            object.__setattr__(self, "compat", pattern.compat)
            pattern = dataclasses.replace(pattern, compat=None)
        if self.compat is not None:
            if not isinstance(pattern, Dilated) or pattern.head_groups:
                raise ValueError(
                    f"compat={self.compat!r}: needs a pattern of Dilated without head groups; got {pattern}"
                )
            if pattern.offsets == "head":
                pattern = dataclasses.replace(pattern, offsets="head_block")
        object.__setattr__(self, "pattern", pattern)

    def _check_selection(self) -> None:
        if not isinstance(self.selection, Selection):
            raise ValueError(
                f"selection={_short(self.selection)}: must be a NativeSparse, a BlockMixture, an IndexedKeys or None"
            )
        for name in ("sub_ln", "attention_dropout", "compat"):
            if getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r}: modules that select have none")
        object.__setattr__(self, "pattern", None)

    def _check_pattern(self) -> None:
        if self.pattern is None:
            return
        terms = self.pattern.terms if isinstance(self.pattern, Sum) else (self.pattern,)
        lengths: list[int] = []
        for term in terms:
            if isinstance(term, Dilated):
                lengths += term.segment_lengths + term.dilation_rates
            elif isinstance(term, Window):
                lengths += (term.before, term.rate, term.leading)
            else:
                raise ValueError(
                    f"pattern={self.pattern!r}: must be a Dilated, a Window or their sum, or None for dense attention"
                )

        if len(lengths) > 2 * MOST:
            raise ValueError(f"pattern: has {len(lengths) // 2:,} branches; it may have at most {MOST:,}")
        if max(lengths) > MOST_TOKENS:
            raise ValueError(f"pattern: {_short(max(lengths))} tokens are more than {MOST_TOKENS:,}, the most")
        self.pattern.branches(self.kv_heads)  # a table of offsets must fit the heads

    @property
    def attention_pattern(self) -> Dilated | Window | Sum | None:
        """Return `pattern` with `compat` applied."""
        if isinstance(self.pattern, Dilated):
            return dataclasses.replace(self.pattern, compat=self.compat)
        return self.pattern

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def mlp_width(self) -> int:
        return 4 * self.embed_dim if self.mlp_dim is None else self.mlp_dim

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def rotary(self) -> Rotary | None:
        if self.positions is None:
            return None
        scale_base = float(self.xpos_scale_base) if self.positions == "xpos" else None
        return Rotary(self.head_dim, float(self.rope_base), scale_base)


def released_encoder(embed_dim: int, num_layers: int, pattern: Dilated, *, final_norm: bool = True) -> LongNetConfig:
    """Return the configuration of an encoder as torchscale released them: 16 heads over vectors without positions."""
    return LongNetConfig(
        vocab_size=None,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=16,
        pattern=pattern,
        positions=None,
        sub_ln=True,
        bias=True,
        final_norm=final_norm,
        compat="torchscale",
    )
