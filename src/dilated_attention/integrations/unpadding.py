"""Run the layers of a transformers model on the real tokens of a padded batch alone.

Attention skips padding by itself, but linear layers, norms and activations do not, and in short batches they take nine
tenths of a forward.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from dilated_attention import UnsupportedError
from dilated_attention.integrations import over_ranks
from dilated_attention.integrations.own_attention import NAME
from dilated_attention.integrations.positions import require_transformers

_BY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")
"""The arguments of a model that hold one entry per token."""

CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 1e-2}
"""The largest relative difference at which the states of a packed batch are those of the padded one."""


def unpad(model: PreTrainedModel) -> PreTrainedModel:
    """Let a transformers model compute the real tokens of padded batches alone, in place, and return it.

    Before its layers run, a batch with padding after its tokens is packed: all real tokens become one sequence, and
    each sample attends to itself. States return at their places, with 0 at padding. Other forwards run as they did:
    those without padding, with padding before the tokens, with a cache (a decoder makes one unless
    `config.use_cache = False`), over a mesh, in a graph of torch.compile, or with another implementation.

    Args:
        model: one that has its own attention of this library, `attn_implementation="dilated_attention"`. Its
            `base_model` is what packs, so that a head sees states at the places that it knows.

    Raises:
        ValueError: the model has another implementation or a dilated pattern.
        UnsupportedError: the model's forward takes no `position_ids`, or the states of a small packed batch are not
            those of the padded one: its layers mix tokens by other means than attention, its positions do not count
            from 0, or it pools.

    Examples:
        >>> from dilated_attention.integrations.huggingface import unpad
        >>> from transformers import ModernBertConfig, ModernBertModel
        >>> sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> config = ModernBertConfig(**sizes, vocab_size=60, pad_token_id=0, attn_implementation="dilated_attention")
        >>> model = unpad(ModernBertModel(config).eval())
        >>> tokens, mask = torch.randint(60, (2, 5)), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
        >>> model(input_ids=tokens, attention_mask=mask).last_hidden_state[1, 2:].any()
        tensor(False)
    """
    require_transformers(model)
    body: Any = model.base_model
    if not _has_own_attention(body.config):
        raise ValueError(
            f'{type(model).__name__} must have attn_implementation="{NAME}", without a pattern; '
            f'call model.set_attn_implementation("{NAME}") on a model that is not dilated'
        )
    parameters = inspect.signature(body.forward).parameters
    if not {"attention_mask", "position_ids"} <= parameters.keys():
        raise UnsupportedError(f"{type(body).__name__}.forward takes no position_ids, so that texts cannot be packed")
    if any(isinstance(hook, _Pack) for hook in body._forward_pre_hooks.values()):
        return model
    padded = _output_of_a_small_batch(body)
    pack = _Pack(tuple(parameters), caches=padded.get("past_key_values") is not None)
    handles = (
        body.register_forward_pre_hook(pack, with_kwargs=True),
        body.register_forward_hook(pack.unpacked),
    )
    try:
        _require_equal(body, padded, _output_of_a_small_batch(body, use_cache=False))
    except BaseException:
        for handle in handles:
            handle.remove()
        raise
    return model


class _Running(threading.local):
    """Hold the real tokens of the batch that each body packed, by its id, in this thread. Copies of a model have none:
    a `_Pack` is copied and pickled with its model."""

    def __init__(self) -> None:
        self.real: dict[int, Tensor] = {}


_running = _Running()


class _Pack:
    """Pack the padded batch that a model is given, and put the states that it returns at their places.

    Attributes:
        names: the arguments of the model's forward, in order.
        caches: whether the model returns a cache by default.
    """

    def __init__(self, names: tuple[str, ...], caches: bool) -> None:
        self.names = names
        self.caches = caches

    def __call__(self, body: Any, values: tuple[Any, ...], given: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return None
        _running.real.pop(id(body), None)  # of a forward that failed
        given = dict(zip(self.names, values, strict=False)) | given
        mask = given.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2 or not self._may_pack(body.config, given, mask):
            return None
        real = mask.bool()
        if real.all() or not real[:, 0].all() or (real[:, 1:] & ~real[:, :-1]).any():
            return None
        _running.real[id(body)] = real
        if given.get("position_ids") is None:
            given["position_ids"] = torch.arange(real.shape[1], device=real.device)[None]
        for name in _BY_TOKEN:
            x = given.get(name)
            if x is not None:
                given[name] = x.expand(len(real), *x.shape[1:])[real].unsqueeze(0)
        lengths = real.sum(1)
        edges = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
        given |= {"attention_mask": None, "cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
        return (), given

    def _may_pack(self, config: Any, given: dict[str, Any], mask: Tensor) -> bool:
        """Return whether a forward has this library's attention on one device, no cache, and only tensors that this
        module packs."""
        if not _has_own_attention(config) or over_ranks.active() is not None:
            return False
        use_cache = given.get("use_cache")
        if use_cache is None:
            use_cache = self.caches and config.use_cache
        if use_cache or given.get("past_key_values") is not None:
            return False
        if given.get("output_router_logits", getattr(config, "output_router_logits", False)):
            return False  # a loss counts them with the padded batch's mask
        if any(isinstance(x, Tensor) for name, x in given.items() if name not in ("attention_mask", *_BY_TOKEN)):
            return False
        places = given.get("position_ids")
        return places is None or (places.ndim == 2 and places.shape[1] == mask.shape[1])

    def unpacked(self, body: nn.Module, _values: tuple[Any, ...], output: Any) -> Any:
        if torch.compiler.is_compiling():
            return output
        real = _running.real.pop(id(body), None)
        return output if real is None else _unpacked(output, real)


def _has_own_attention(config: Any) -> bool:
    return config._attn_implementation == NAME and getattr(config, NAME, None) is None


def _unpacked(x: Any, real: Tensor) -> Any:
    """Return an output with each tensor of packed tokens `(1, tokens, ...)` as `(batch, seq, ...)`, 0 at padding."""
    if isinstance(x, ModelOutput):
        for name, value in x.items():
            x[name] = _unpacked(value, real)
        return x
    if isinstance(x, (tuple, list)):
        return type(x)([_unpacked(value, real) for value in x])
    if not isinstance(x, Tensor):
        return x
    return x.new_zeros(*real.shape, *x.shape[2:]).masked_scatter(real.view(*real.shape, *[1] * (x.ndim - 2)), x)


@torch.no_grad()
def _output_of_a_small_batch(body: PreTrainedModel, **options: Any) -> dict[str, Any]:
    """Return the output for two texts of 9 and 4 tokens, in eval mode."""
    device = next(body.parameters()).device
    tokens = torch.arange(18, device=device).view(2, 9) % body.config.vocab_size
    mask = torch.arange(9, device=device) < torch.tensor([[9], [4]], device=device)
    training = [module for module in body.modules() if module.training]
    body.eval()
    try:
        return dict(body(input_ids=tokens, attention_mask=mask.long(), return_dict=True, **options))
    finally:
        for module in training:
            module.training = True


def _require_equal(body: nn.Module, padded: dict[str, Any], packed: dict[str, Any]) -> None:
    """Raise UnsupportedError unless the states of real tokens are equal."""
    for name, x in padded.items():
        if not isinstance(x, Tensor):
            continue
        y = packed[name]
        if y.shape != x.shape or x.shape[:2] != (2, 9):
            raise UnsupportedError(
                f"{type(body).__name__} returns {name} of shape {tuple(x.shape)}, which is not one state per token: "
                "make the model without its pooling layer (add_pooling_layer=False)"
            )
        for sample, length in ((0, 9), (1, 4)):
            a, b = x[sample, :length].double(), y[sample, :length].double()
            if not (a - b).norm() <= CLOSE[x.dtype] * a.norm():
                raise UnsupportedError(
                    f"{type(body).__name__} computes other states for packed texts: its layers mix tokens by other "
                    "means than attention, or its positions do not count from 0; use it padded"
                )
