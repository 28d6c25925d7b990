"""Run a block layout or a mask in other ways that PyTorch offers, to compare sparse attention with.

Each function makes its tables once, and returns the call to time. The call takes q, k and v `(1, seq, heads,
head_dim)`, whose heads share the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dilated_attention import BlockLayout

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def flex(layout: BlockLayout) -> Call:
    """Return a function of q, k and v `(1, seq, heads, head_dim)` that calls compiled FlexAttention."""
    if layout.seq_len % layout.q_block or layout.seq_len % layout.k_block:
        raise ValueError(f"method='flex' needs whole blocks of {layout.block_size}; got seq_len={layout.seq_len}")
    mask_on = cache(block_mask(layout).to)
    # For this shape alone: after a second one PyTorch compiles for any, and after eight it compiles no more.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    tile = min(128, *layout.block_size)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.requires_grad and not q.is_cuda:
            raise NotImplementedError("FlexAttention has no backward on CPU")
        # Its own choice of tiles on GPUs may exceed blocks of fewer than 128, which it refuses.
        options = {"BLOCK_M": tile, "BLOCK_N": tile} if tile < 128 and q.is_cuda else None
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask_on(q.device), kernel_options=options).transpose(1, 2)  # type: ignore[arg-type]

    return call


def flex_with_mask(mask_mod: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """Return a call of compiled FlexAttention with a mask, for these q, k and v, without gradients."""
    blocks = create_block_mask(mask_mod, None, None, q.shape[1], k.shape[1], device=str(q.device))
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    q, k, v = (x.detach().transpose(1, 2) for x in (q, k, v))

    @torch.no_grad()
    def call() -> Tensor:
        return compiled(q, k, v, block_mask=blocks)

    call()  # compiles
    return call


def block_mask(layout: BlockLayout) -> BlockMask:
    """Return a layout as a BlockMask. Only the diagonal blocks of a causal layout are masked inside.

    Its lists are as wide as the sequence has blocks, which compiled FlexAttention needs on CPU.
    """
    active = layout.dense_blocks()
    diagonal = torch.eye(layout.query_blocks, dtype=torch.bool) & layout.is_causal

    def lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
        return chosen.sum(-1).int(), chosen.int().argsort(dim=-1, descending=True, stable=True).int()

    cut, cut_indices = lists(active & diagonal)
    whole, whole_indices = lists(active & ~diagonal)
    return BlockMask.from_kv_blocks(cut, cut_indices, whole, whole_indices, layout.block_size, _not_future)


def _not_future(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Call `scaled_dot_product_attention` on q, k and v `(batch, seq, heads, head_dim)`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def mask(layout: BlockLayout) -> Call:
    """Return a function of q, k and v that calls `scaled_dot_product_attention` with a boolean mask of all pairs."""
    pairs_on = cache(layout.dense_mask().to)
    return lambda q, k, v: sdpa(q, k, v, attn_mask=pairs_on(q.device))


def gather(layout: BlockLayout) -> Call:
    """Return a function of q, k and v that gathers the key blocks of each query block, padded to the longest list, for
    one masked call of `scaled_dot_product_attention`."""
    if layout.seq_len % layout.q_block or layout.seq_len % layout.k_block:
        raise ValueError(f"method='gather' needs whole blocks of {layout.block_size}; got seq_len={layout.seq_len}")
    counts, rows = layout.counts[0, 0], layout.query_blocks
    width = int(counts.max())
    listed = torch.arange(width) < counts[:, None]
    keys = torch.zeros(rows, width, dtype=torch.int64).masked_scatter_(listed, layout.indices)
    key = (keys * layout.k_block)[..., None] + torch.arange(layout.k_block)
    seen = listed[..., None].expand(key.shape).flatten(1)[:, None, None]  # row, head, query, key
    if layout.is_causal:
        query = torch.arange(layout.seq_len).view(rows, layout.q_block)
        seen = seen & (key.flatten(1)[:, None, None] <= query[:, None, :, None])
    mask_on = None if bool(seen.all()) else cache(seen.to)

    def blocks(x: Tensor) -> Tensor:
        x = x[0].unflatten(0, (-1, layout.k_block))[keys]  # row, block, token, head, dim
        return x.flatten(1, 2).transpose(1, 2)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query = q[0].unflatten(0, (rows, -1)).transpose(1, 2)
        attn_mask = None if mask_on is None else mask_on(q.device)
        out = F.scaled_dot_product_attention(query, blocks(k), blocks(v), attn_mask=attn_mask)
        return out.transpose(1, 2).flatten(0, 1)[None]

    return call


def sparse(layout: BlockLayout) -> Call:
    """Return a function of q, k and v that runs torch.sparse for each head: `sampled_addmm` on CSR, `softmax` on COO
    (CSR has none), `mm` on CSR."""
    pairs = layout.dense_mask()[0, 0]
    crow = F.pad(pairs.sum(1).cumsum(0), (1, 0))
    at = pairs.nonzero().T.contiguous()
    n = layout.seq_len

    def matrix(values: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(crow, at[1], values, size=(n, n), check_invariants=False)

    nothing = matrix(torch.zeros(at.shape[1]))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for h in range(q.shape[2]):
            score = torch.sparse.sampled_addmm(nothing, q[0, :, h], k[0, :, h].T, alpha=q.shape[3] ** -0.5)
            coo = torch.sparse_coo_tensor(at, score.values(), (n, n), is_coalesced=True, check_invariants=False)
            out[0, :, h] = matrix(torch.sparse.softmax(coo, 1).values()) @ v[0, :, h]
        return out

    return call


RIVALS: dict[str, Callable[[BlockLayout], Call]] = {
    "flex": flex,
    "gather": gather,
    "mask": mask,
    "torch.sparse": sparse,
}
