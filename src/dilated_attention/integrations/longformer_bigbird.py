"""Compute the attention of transformers' Longformer, LED (encoder) and BigBird with this library.

Both families are older than transformers' attention interface, and have attention modules of their own:

- Longformer (arXiv:2004.05150): token i sees the tokens within w of it and the global tokens, in one softmax; a
  global token sees all tokens, through separate projections.
- BigBird (arXiv:2007.14062): a block of queries sees its neighbouring blocks, the first and the last block, and r
  random blocks that the module draws. The first and the last block see all. A block that a row names twice counts
  twice in its softmax: outside training transformers draws block 0 for every row, r times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention
from transformers.models.led.modeling_led import LEDEncoderSelfAttention
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from dilated_attention import BlockLayout, Dilated, Sum, UnsupportedError, Window
from dilated_attention.integrations.own_attention import attended


def replace_attention(model: nn.Module) -> list[str]:
    """Change a Longformer, LED or BigBird model, in place, to compute its attention with this library.

    For LED this concerns the encoder. Parameters, buffers and the state_dict stay the same. The attention modules
    get a class that inherits from their own.

    Returns:
        The names of the changed modules.

    Raises:
        ValueError: the model has no such modules. A later forward refuses `output_attentions`.

    Examples:
        >>> from dilated_attention.integrations.longformer_bigbird import replace_attention
        >>> from transformers import LongformerConfig, LongformerModel
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
        >>> model = LongformerModel(LongformerConfig(vocab_size=100, attention_window=8, **sizes))
        >>> replace_attention(model)
        ['encoder.layer.0.attention.self']
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, tuple(_CLASSES))}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention of {', '.join(theirs.__name__ for theirs in _CLASSES)}; models "
            'whose class has _supports_attention_backend take attn_implementation="dilated_attention"'
        )
    ours: dict[type, type[nn.Module]] = {**_CLASSES, **{cls: cls for cls in _CLASSES.values()}}
    for name, module in found.items():
        if type(module) not in ours:
            raise ValueError(
                f"{name} has the class {type(module).__name__}, made of one of transformers; call replace_attention "
                "before fully_shard, or whatever made that class"
            )
    for module in found.values():
        module.__class__ = ours[type(module)]
    return list(found)


class _WindowAndGlobals(LongformerSelfAttention):
    """Compute Longformer's attention. The arguments are those of transformers' module."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        is_index_masked: Tensor | None = None,
        is_index_global_attn: Tensor | None = None,
        is_global_attn: bool | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor]:
        _refuse_weights(output_attentions)
        masked, is_global = is_index_masked, is_index_global_attn
        assert masked is not None
        assert is_global is not None

        def heads(project: Any, x: Tensor) -> Tensor:
            return project(x).unflatten(-1, (self.num_heads, self.head_dim))

        q, k, v = (heads(project, hidden_states) for project in (self.query, self.key, self.value))
        dropout_p, side = (self.dropout if self.training else 0.0), self.one_sided_attn_window_size
        # Keys of global tokens come once more, in front of all, and are hidden from the windows.
        place, missing = _places(is_global)
        most, seq_len = place.shape[1], q.shape[1]
        k, v = (torch.cat([_taken(x, place), x], 1) for x in (k, v))
        hidden = torch.cat([missing, masked | is_global], 1)
        pattern = Window(side, side, leading=most)
        out = attended(q, k, v, pattern, key_padding_mask=hidden, dropout_p=dropout_p, q_start=most, k_start=0)
        if most:
            q = heads(self.query_global, _taken(hidden_states, place))
            k, v = (heads(project, hidden_states) for project in (self.key_global, self.value_global))
            every = Dilated((seq_len,), (1,))
            of_globals = attended(q, k, v, every, key_padding_mask=masked, dropout_p=dropout_p, q_start=0, k_start=0)
            samples = torch.arange(len(q), device=q.device)[:, None].expand_as(place)
            out = out.index_put((samples[~missing], place[~missing]), of_globals[~missing])
        return (out.masked_fill(masked[..., None, None], 0.0).flatten(2),)


class _WindowAndGlobalsOfLED(LEDEncoderSelfAttention):
    forward = _WindowAndGlobals.forward


class _Blocks(BigBirdBlockSparseAttention):
    """Compute BigBird's attention. The arguments are those of transformers' module."""

    def forward(
        self,
        hidden_states: Tensor,
        band_mask: Tensor | None = None,
        from_mask: Tensor | None = None,
        to_mask: Tensor | None = None,
        from_blocked_mask: Tensor | None = None,
        to_blocked_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        assert from_mask is not None
        assert to_mask is not None
        _refuse_weights(options.get("output_attentions"))
        q, k, v = (
            project(hidden_states).unflatten(-1, (self.num_attention_heads, self.attention_head_size))
            for project in (self.query, self.key, self.value)
        )
        out = attended(q, k, v, _blocks(self, q.shape[1], q.device), key_padding_mask=to_mask[:, 0, 0] == 0)
        return (out * from_mask.transpose(1, 2)).flatten(2), None


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    LongformerSelfAttention: _WindowAndGlobals,
    LEDEncoderSelfAttention: _WindowAndGlobalsOfLED,
    BigBirdBlockSparseAttention: _Blocks,
}


def _refuse_weights(wanted: Any) -> None:
    if wanted:
        raise UnsupportedError(
            "output_attentions: the probabilities are never formed; make the model without replace_attention for them"
        )


def _places(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions where `chosen` `(batch, seq)` is True, `(batch, most)`, and which of them are padding.

    `most` is the largest number of True entries in a sample; samples with fewer are padded with other positions.
    """
    counts = chosen.sum(1)
    most = int(counts.max())
    order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    return order, torch.arange(most, device=chosen.device) >= counts[:, None]


def _taken(x: Tensor, place: Tensor) -> Tensor:
    """Return the tokens of x `(batch, seq, ...)` at the positions `place` `(batch, n)`: `(batch, n, ...)`."""
    return x[torch.arange(len(x), device=x.device)[:, None], place]


def _blocks(module: Any, seq_len: int, device: torch.device) -> BlockLayout | Sum:
    """Return what BigBird shows: a layout, or a sum of layouts if a query block lists the same key block twice."""
    drawn = torch.from_numpy(_drawn(module, seq_len)).long()
    heads, blocks = len(drawn), seq_len // module.block_size
    row = torch.arange(blocks)
    near = (row[:, None] - row).abs() <= 1
    ends = (row == 0) | (row == blocks - 1)
    counts = (near | ends[:, None] | ends).long().expand(heads, -1, -1).clone()
    counts[:, 1:-1].scatter_add_(2, drawn, torch.ones_like(drawn))
    layouts = [
        BlockLayout.from_mask(counts >= i, seq_len, module.block_size).to(device)
        for i in range(1, int(counts.max()) + 1)
    ]
    return layouts[0] if len(layouts) == 1 else Sum(tuple(layouts))


def _drawn(module: Any, seq_len: int) -> np.ndarray[Any, Any]:
    """Return the key blocks that the module draws for every query block except the first and the last.

    The shape is `(heads, query blocks - 2, num_random_blocks)`. In training this seeds NumPy's generator as the module
    does, so that the generator ends in the same state.
    """
    size, heads = module.block_size, module.num_attention_heads
    if module.training:
        np.random.seed(module.seed)
    if seq_len in (1024, 3072, 4096):  # the lengths of the paper have plans of their own
        most, number = module.max_seqlen, module.num_random_blocks
        draws = [module._bigbird_block_rand_mask(most, most, size, size, number, last_idx=1024) for _ in range(heads)]
        return np.stack(draws)[:, : seq_len // size - 2]
    ends, numbers = module._get_rand_attn_plan(seq_len, size, module.num_random_blocks)
    return np.stack(module._bigbird_block_rand_mask_with_head(seq_len, seq_len, size, size, heads, ends, numbers))
