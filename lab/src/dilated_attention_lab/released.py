"""Run the algorithm of released torchscale and GigaPath code, to measure against and to compare outputs with.

No model uses it. It does what the released modules do, step by step, on their own state_dict. For each branch the
sequence is padded with zeros to whole segments, and these to whole dilated rows. The rows of every head are gathered
into a copy, attended, and scattered into a dense zero tensor. The dense results of all branches are mixed by the
softmax of their logsumexps. Only the flash-attention call, which supports neither CPU nor float32, is replaced, by
PyTorch's fused operator. tests/test_released.py compares it with recorded outputs of the released code itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention.plumbing import Scores, fused


@dataclass(frozen=True, slots=True)
class Attention:
    """Hold the settings of attention that the state_dict does not contain.

    xpos: rotate queries and keys as torchscale's XPOS does: channels (2i, 2i + 1) form a pair, scale_base is 512.
    """

    num_heads: int
    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    is_causal: bool = False
    xpos: bool = False


def _padded(x: Tensor, multiple: int, dim: int) -> Tensor:
    short = -x.shape[dim] % multiple
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, short)) if short else x


def _gather(x: Tensor, segment: int, rate: int) -> Tensor:
    """Return (batch x segments, rows, heads, dim) from (batch, seq, heads, dim): each head's tokens as rows.

    The heads form `rate` blocks of neighbours; block j keeps tokens j, j + rate, ... of each segment. Zeros fill up the
    last segment, and each segment to a multiple of `rate`.
    """
    heads, dim = x.shape[2:]
    x = _padded(x, segment, 1).reshape(-1, segment, heads, dim)
    x = _padded(_padded(x, rate, 2), rate, 1)
    x = x.unflatten(2, (rate, -1)).unflatten(1, (-1, rate))  # batch, rows, position, head block, head, dim
    x = torch.diagonal(x, 0, 2, 3)  # batch, rows, head, dim, head block
    return x.permute(0, 1, 4, 2, 3).flatten(2, 3)[:, :, :heads].contiguous()


def _scatter(out: Tensor, lse: Tensor, batch: int, seq: int, rate: int) -> tuple[Tensor, Tensor]:
    """Undo `_gather` for out (batch x segments, rows, heads, dim) and lse (batch x segments, heads, rows).

    Return out (batch x heads, seq, dim) and lse (batch x heads, seq, 1): 0 and -1e8 at tokens that were not gathered.
    """
    heads = out.shape[2]
    short = -heads % rate
    out, lse = F.pad(out, (0, 0, 0, short)), F.pad(lse, (0, 0, 0, short), value=-1e8)
    out = torch.diag_embed(out.unflatten(2, (rate, -1)).permute(0, 1, 3, 4, 2), 0, 4, 5)  # ..., dim, position, block
    out = out.permute(0, 5, 2, 1, 4, 3).flatten(3, 4).flatten(1, 2)
    lse = torch.diag_embed(lse.unflatten(1, (rate, -1)).permute(0, 3, 2, 1), 0, 3, 4)
    lse = lse.masked_fill(lse == 0, -1e8)
    lse = lse.permute(0, 4, 2, 1, 3).flatten(3, 4).flatten(1, 2).unsqueeze(-1)
    out, lse = out[:, :heads], lse[:, :heads]
    parts = [x.unflatten(0, (batch, -1)).transpose(1, 2).flatten(0, 1).flatten(1, 2) for x in (out, lse)]
    return parts[0][:, :seq], parts[1][:, :seq]


def dilated(q: Tensor, k: Tensor, v: Tensor, options: Attention) -> Tensor:
    """Compute dilated attention: (batch, seq, heads, dim) to (batch, seq, heads x dim). The branches are mixed by the
    softmax of their lse."""
    batch, seq, heads, dim = q.shape
    outs, lses = [], []
    for segment, rate in zip(options.segment_lengths, options.dilation_rates, strict=True):
        q_, k_, v_ = (_gather(x, min(segment, seq), rate).transpose(1, 2) for x in (q, k, v))
        out, lse = fused.forward(fused.Settings(Scores(dim**-0.5), options.is_causal), q_, k_, v_)
        outs.append(out.transpose(1, 2))
        lses.append(lse)
    dense = [
        _scatter(out, lse, batch, seq, rate) for out, lse, rate in zip(outs, lses, options.dilation_rates, strict=True)
    ]
    del outs, lses
    greatest = torch.stack([lse for _, lse in dense]).amax(0)
    weights = [torch.exp(lse - greatest) for _, lse in dense]
    total = torch.stack(weights).sum(0)
    weights = [weight / total for weight in weights]
    mixed = dense[0][0] * weights[0]
    for (out, _), weight in zip(dense[1:], weights[1:], strict=True):
        mixed += out * weight
    return mixed.view(batch, heads, seq, dim).transpose(1, 2).flatten(2)


def _linear(state: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def _norm(state: Mapping[str, Tensor], name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)


def _xpos(x: Tensor, inverse: bool) -> Tensor:
    """Return x `(batch, seq, heads, dim)`, rotated, and scaled by the distance to the middle of the sequence.

    inverse: divide by the scale, as torchscale does for keys.
    """
    seq, dim = x.shape[1], x.shape[3]
    channel = torch.arange(0, dim, 2, device=x.device)
    position = torch.arange(seq, device=x.device)[:, None]
    scale = ((channel + 0.4 * dim) / (1.4 * dim)) ** ((position - (seq + 1) // 2) / 512)
    angle = position / 10_000 ** (channel / dim)
    scale = 1 / scale if inverse else scale
    sin, cos = ((f(angle) * scale).repeat_interleave(2, 1)[:, None] for f in (torch.sin, torch.cos))
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + turned * sin


def attention(state: Mapping[str, Tensor], prefix: str, x: Tensor, options: Attention) -> Tensor:
    """Compute torchscale's `DilatedAttention` of x `(batch, seq, embed_dim)`."""
    q, k, v = (_linear(state, f"{prefix}{name}_proj", x).unflatten(-1, (options.num_heads, -1)) for name in "qkv")
    if options.xpos:
        q, k = _xpos(q, False), _xpos(k, True)
    # The released code keeps (batch x heads, seq, dim) copies.
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    out = dilated(q, k, v, options)
    if f"{prefix}inner_attn_ln.weight" in state:
        out = _norm(state, f"{prefix}inner_attn_ln", out)
    return _linear(state, f"{prefix}out_proj", out)


def stack(state: Mapping[str, Tensor], prefix: str, x: Tensor, options: Attention) -> Tensor:
    """Run torchscale's pre-norm LongNet encoder or decoder on embedded x `(batch, seq, embed_dim)`.

    A final norm is applied if `state` holds one.
    """
    i = 0
    while f"{prefix}layers.{i}.self_attn.q_proj.weight" in state:
        layer = f"{prefix}layers.{i}."
        normed = _norm(state, f"{layer}self_attn_layer_norm", x)
        x = x + attention(state, f"{layer}self_attn.", normed, options)
        hidden = _linear(state, f"{layer}ffn.fc1", _norm(state, f"{layer}final_layer_norm", x))
        hidden = F.gelu(hidden.float()).type_as(hidden)
        if f"{layer}ffn.ffn_layernorm.weight" in state:
            hidden = _norm(state, f"{layer}ffn.ffn_layernorm", hidden)
        x = x + _linear(state, f"{layer}ffn.fc2", hidden)
        i += 1
    return _norm(state, f"{prefix}layer_norm", x) if f"{prefix}layer_norm.weight" in state else x


def gigapath(state: Mapping[str, Tensor], x: Tensor, places: Tensor, options: Attention) -> Tensor:
    """Return GigaPath's embedding of slides x `(batch, tiles, in_chans)`, made from the cls token. `places` are the
    fixed position encodings of the tiles, `(batch, tiles, embed_dim)`."""
    x = _linear(state, "patch_embed.proj", x) + places
    x = torch.cat((state["cls_token"].expand(len(x), -1, -1), x), 1)
    return _norm(state, "norm", stack(state, "encoder.", x, options)[:, 0], 1e-6)
