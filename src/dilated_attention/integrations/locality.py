"""Find out whether a transformers model computes each token from this token and its position alone, but for attention.

Only then can ranks that hold shards of a sequence run it. `probed` tests that with a few tokens, by attention that
looks at no other token: it takes the place of the model's own as long as `ACTIVE` holds a `Probe`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilated_attention import UnsupportedError
from dilated_attention.integrations.own_attention import Shown
from dilated_attention.integrations.positions import has_numbering_of_its_own

ACTIVE: ContextVar[Any] = ContextVar("forward over ranks", default=None)


def active() -> Any:
    """Return the `forward_over_ranks.Forward` or `Probe` in progress; None: neither, as in a model without a mesh."""
    return None if torch.compiler.is_compiling() else ACTIVE.get()


_LOCAL_LAYERS = {
    "full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "dense", "sparse",
}  # fmt: skip
"""Values of `config.layer_types` and of its like for layers over MLPs whose layers look along the sequence by attention
alone."""


def accepts(model: nn.Module, name: str) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(x.kind is x.VAR_KEYWORD for x in parameters.values())


_TOKENS = 11
"""The tokens of a probe: a number that no other dimension of a model is likely to have."""


@dataclass(eq=False)
class Probe:
    """Take the place of a `Forward`, and of each layer's attention: a layer returns a function of its own token's q, k
    and v, so that nothing but what the model does besides carries from token to token."""

    names: dict[nn.Module, str]
    layers: dict[nn.Module, str] = field(default_factory=dict)
    indexers: set[nn.Module] = field(default_factory=set)
    finds_packed: bool = False
    is_causal: bool = False
    blocks: Tensor | None = None
    start: int = 0
    seq_len: int = _TOKENS

    def described(self, shown: Shown) -> Shown:
        self.finds_packed |= shown.samples is not None
        self.is_causal |= shown.is_causal
        if shown.blocks is not None:
            self.blocks = shown.blocks[0]
        return replace(shown, samples=None, blocks=None, ranks=self)

    @property
    def runs_are_blocks(self) -> bool | None:
        """Return whether each run of marked tokens sees itself alone (images), or all see one another (a prefix); None:
        the mask of the last run does not tell."""
        if self.blocks is None:
            return None
        marked = self.blocks >= 0
        begins = self.blocks[marked & ~F.pad(marked, (1, 0))[:-1]]  # the number of each run
        if len(begins) < 2:
            return None
        return bool((begins[0] != begins[1:]).all())

    def index(self, shown: Shown, indexer: nn.Module) -> tuple[Shown, None]:
        self.indexers.add(indexer)
        return shown, None

    def attend(self, shown: Shown, q: Tensor, k: Tensor, v: Tensor, layer: nn.Module, **options: Any) -> Tensor:
        self.layers[layer] = self.names[layer]
        repeats = q.shape[2] // k.shape[2]
        of_keys = k.mean(-1, keepdim=True) + v
        return of_keys.repeat_interleave(repeats, 2) + q.mean(-1, keepdim=True)

    def attend_dilated(
        self, shown: Shown, q: Tensor, k: Tensor, v: Tensor, pattern: Any, layer: nn.Module, **_: Any
    ) -> Tensor:
        return self.attend(shown, q, k, v, layer)


TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids"}
"""The arguments by which models learn which tokens are an image or a prefix."""


@torch.no_grad()
def probed(model: PreTrainedModel) -> Probe:
    """Return the names of a model's attention layers, whether it finds packed samples, and which marked tokens see one
    another.

    The model runs twice on a few tokens with attention that looks at no other token, the second time with the tokens in
    the opposite order and the last of them replaced; their positions go with them. If it takes token types, it runs
    once more, with two runs of marked tokens, to show its mask. Raises UnsupportedError, which names
    the layer, if another token's output then differs, if no layer calls this library, or if a layer is a convolution or
    recurrence.
    """
    name = type(model).__name__
    _require_plain_model(model)
    probe = Probe({module: path for path, module in model.named_modules()})
    table = cast(nn.Embedding, model.get_input_embeddings()).weight
    tokens = torch.randint(table.shape[0], (1, _TOKENS), generator=torch.Generator().manual_seed(0)).to(table.device)
    places = torch.arange(_TOKENS, device=table.device)[None]
    reverse = tokens.flip(1)
    reverse[:, 0] = (reverse[:, 0] + 1) % table.shape[0]

    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        first, output = _run(model, probe, tokens, places)
        second, _ = _run(model, probe, reverse, places.flip(1))
        if probe.is_causal:
            types = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0]], device=table.device)
            for argument in TOKEN_TYPES & inspect.signature(model.forward).parameters.keys():
                _run(model, probe, tokens, places, {argument: types})
    finally:
        for module, mode in training.items():
            module.training = mode
    if not probe.layers:
        raise UnsupportedError(
            f'{name} does not call this library: load it with attn_implementation="dilated_attention" before '
            "set_context_parallel"
        )
    for module, outputs in first.items():
        is_local = not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase))
        if type(module).__name__.endswith("Indexer") and module not in probe.indexers:
            is_local = False
        for x, y in zip(outputs, second.get(module, []), strict=False):
            is_local = is_local and _agree(x, y)
        if not is_local:
            raise UnsupportedError(
                f"{name} over a mesh is not supported: {probe.names[module]} ({type(module).__name__}) looks along the "
                "sequence, or counts positions from the first token of a shard; choose a model in which attention "
                "alone does"
            )
    _require_rows(name, output)
    return probe


def _run(
    model: nn.Module, probe: Probe, tokens: Tensor, places: Tensor, more: Mapping[str, Tensor] | None = None
) -> tuple[dict[nn.Module, list[Tensor]], Any]:
    """Return the rows of tokens that each module returned, in the order in which modules end, and the output."""
    found: dict[nn.Module, list[Tensor]] = {}

    def record(module: nn.Module, args: Any, output: Any) -> None:
        parts = output if isinstance(output, (tuple, list)) else (output,)
        rows = found.setdefault(module, [])
        for x in parts:
            if isinstance(x, Tensor) and x.is_floating_point() and _TOKENS in x.shape:
                rows.append(x.detach())

    given: dict[str, Any] = {"input_ids": tokens, "position_ids": places, **(more or {})}
    if accepts(model, "use_cache"):
        given["use_cache"] = False
    handles = [module.register_forward_hook(record) for module in model.modules()]
    before = ACTIVE.set(probe)
    try:
        return found, model(**given)
    finally:
        ACTIVE.reset(before)
        for handle in handles:
            handle.remove()


def _require_rows(name: str, output: Any) -> None:
    """Raise UnsupportedError unless every tensor of a model's output has a row for each token."""
    for key, x in output.items():
        parts = x if isinstance(x, (tuple, list)) else (x,)
        for part in parts:
            if isinstance(part, Tensor) and _TOKENS not in part.shape:
                raise UnsupportedError(
                    f"{name} returns {key} of shape {tuple(part.shape)}, computed from the whole sequence, which no "
                    "rank holds: use a model that returns states or logits of each token (add_pooling_layer=False)"
                )


def _agree(x: Tensor, y: Tensor) -> bool:
    """Return whether y holds the rows of x in the opposite order, but for its first."""
    if x.shape != y.shape:
        return True  # the rows of experts, which are chosen
    axis = list(x.shape).index(_TOKENS)
    first = x.movedim(axis, 0)[:-1].double()
    second = y.movedim(axis, 0).flip(0)[:-1].double()
    tolerance = 1e-3 if x.dtype in (torch.float32, torch.float64) else 0.05
    return bool((first - second).norm() <= tolerance * first.norm())


def _require_plain_model(model: PreTrainedModel) -> None:
    """Raise UnsupportedError for what a model's class and configuration tell."""
    name = type(model).__name__
    reason = None
    if any(x.is_meta for x in model.parameters()):
        reason = "its weights are on the meta device: load them first"
    if getattr(model.config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder; only encoders and decoders alone are supported"
    if model.main_input_name != "input_ids":
        reason = f"its input is {model.main_input_name}; only models of tokens are supported"
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if kinds - _LOCAL_LAYERS:
        reason = f"its config.layer_types has {', '.join(sorted(kinds - _LOCAL_LAYERS))}, which look along the sequence"
    if not accepts(model, "position_ids"):
        reason = "its forward takes no position_ids, and positions of a shard do not begin at 0"
    if has_numbering_of_its_own(model):
        reason = "its learned positions are numbered in a way of its own, not from 0 on"
    for module in model.modules():
        if getattr(module, "_chosen_blocks", None) is not None:
            reason = "sparsify chose blocks of its prompts: call sparsify(model, None)"
    if reason is not None:
        raise UnsupportedError(f"{name} over a mesh is not supported: {reason}")
