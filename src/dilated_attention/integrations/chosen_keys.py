"""Compute the layers of transformers models that choose the keys of each query, at the cost of the keys chosen.

Such a model has an indexer, which scores keys cheaply and lists the best for each query. transformers turns the lists
into a mask over pairs for its own implementations, and hands them to others in three ways:

- As `indices` or `block_indices`, arguments of the attention function (DeepSeek-V3.2, MiniMax-M3). They may name keys
  that the mask hides, so that `as_listed` reads both.
- In a mask that the layer makes of its lists. `serve` overrides the method that makes it, which then returns the lists
  as `Chosen` (GLM5-Next, Qwen4).
- In a bias of compressed keys, which lie behind the layer's own keys (DeepSeek-V4). `serve` keeps it for
  `with_compressed`.

`serve` also makes indexers of DeepSeek's form compute tiles of their scores, so that their memory is linear in the
number of tokens (`index_scores`). As soon as the model has another implementation, transformers' code runs again.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention import BlockLayout, UnsupportedError
from dilated_attention.integrations.index_scores import IndexKeys, IndexMask
from dilated_attention.integrations.own_attention import NAME, Chosen, Rows, Shown, attended
from dilated_attention.plumbing import attend_listed, require_true

SCORES = 2**23
"""An indexer computes as many scores at once, over all index heads; of more it computes tiles. Lists are hidden as many
entries at a time."""


def chooses_keys(config: Any) -> bool:
    """Return whether a configuration says that the model lists the keys of each query."""
    return any(getattr(config, name, None) for name in ("index_topk", "index_topk_blocks", "indexer_budget"))


def as_listed(module: Any, shown: Shown, arguments: dict[str, Any]) -> Shown | Chosen:
    """Return what a layer shows whose arguments are those of transformers' attention function.

    indices: `(batch, queries, k)` integers, for all heads. block_indices: `(batch, KV heads, queries, blocks)`. Entries
    of a row are distinct, or -1 for none. Lists of every key that the mask shows change nothing.
    """
    indices = arguments.get("indices")
    if indices is not None:
        return _listed_keys(shown, indices)
    blocks = arguments.get("block_indices")
    if blocks is not None:
        return _listed_blocks(module, shown, blocks)
    return shown


def _listed_keys(shown: Shown, indices: Tensor) -> Shown | Chosen:
    traced = torch.compiler.is_compiling()  # then values cannot be looked at
    if indices.shape[2] >= shown.keys and not traced and indices.min() >= 0:
        return shown
    return Chosen(that_are_shown(shown, indices)[:, None], shown)


def _listed_blocks(module: Any, shown: Shown, blocks: Tensor) -> Shown | Chosen:
    _require_blocks_from_the_start(module, shown)
    size = module.indexer.block_size
    place = shown.q_start - shown.k_start + torch.arange(shown.queries, device=blocks.device)[:, None]
    own = place // size
    blocks = blocks.masked_fill(blocks > own, -1)
    traced = torch.compiler.is_compiling()
    if shown.is_causal and not traced and ((blocks >= 0).sum(-1) == own[:, 0] + 1).all():
        return shown
    return Chosen(blocks, shown, size)


def that_are_shown(shown: Shown, indices: Tensor) -> Tensor:
    """Return listed keys, `(batch, queries, k)`, with -1 in place of those that the mask hides."""
    step = max(1, SCORES // max(1, indices.shape[0] * indices.shape[2]))
    parts = []
    for first, part in zip(range(0, shown.queries, step), indices.split(step, 1), strict=True):
        some = replace(shown, q_start=shown.q_start + first, queries=part.shape[1])
        parts.append(part.masked_fill(~some.sees(part), -1))
    return torch.cat(parts, 1)


def _require_blocks_from_the_start(module: nn.Module, shown: Shown) -> None:
    """Refuse samples that begin after the first key: transformers counts a query's blocks from its sample's start, and
    blocks of keys from the first key, so that queries would see blocks of other samples or of padding."""
    message = (
        f"{type(module).__name__} chooses blocks of keys, which transformers counts from the start of a row: pad on "
        "the right; got "
    )
    if shown.samples is not None:
        raise UnsupportedError(f"{message}packed samples")
    if shown.hidden is not None:
        require_true((shown.hidden[:, :-1] <= shown.hidden[:, 1:]).all(), f"{message}padding before tokens")


def attend_chosen(chosen: Chosen, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return the attention of q `(batch, queries, heads, head_dim)` over the listed keys of k and v.

    The result is shaped like q, with the head_dim of v; 0 where a list is empty. options: as in `attend`.
    """
    lists = _for_heads(chosen.lists, q.shape[2], k.shape[2])
    if chosen.size == 1:
        return attend_listed(q, k, v, lists, **options)
    shown = chosen.shown
    assert shown is not None
    from_the_start = shown.queries == shown.keys and shown.q_start == shown.k_start
    if not (shown.is_causal and shown.is_plain and from_the_start):
        return attend_listed(q, k, v, _tokens(lists, shown, chosen.size), **options)
    layout = BlockLayout.from_topk(lists, (1, chosen.size), seq_len=shown.keys, is_causal=True)
    return attended(q, k, v, layout, is_causal=True, key_padding_mask=shown.hidden, **options)


def _for_heads(lists: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Return lists of which there is one, one per KV head or one per head; others are repeated for their heads."""
    if lists.shape[1] in (1, kv_heads, heads):
        return lists
    return lists.repeat_interleave(heads // lists.shape[1], 1)


def _tokens(blocks: Tensor, shown: Shown, size: int) -> Tensor:
    """Return the keys of listed blocks that a mask shows: `(batch, lists, queries, keys)`, -1 for none."""
    tokens = blocks[..., None] * size + torch.arange(size, device=blocks.device)
    missing = (blocks < 0)[..., None] | (tokens >= shown.keys)
    tokens = tokens.masked_fill(missing, -1).flatten(3)
    return tokens.masked_fill(~shown.sees(tokens), -1)


def serve(model: nn.Module) -> None:
    """Override the methods of a model's layers that keep lists from the attention function (see this module).

    An override does what the method of the layer's class does where the layer gets no mask of ours.
    """
    module: Any
    for module in model.modules():
        kind = type(module)
        if hasattr(kind, "build_attention_mask_from_topk"):
            module.__dict__["build_attention_mask_from_topk"] = partial(_lists_in_a_mask, module)
        elif hasattr(module, "sinks") and getattr(module, "compressor", None) is not None:
            override(module.compressor, partial(_keep_bias, module))
        elif kind.__name__.endswith("Indexer"):
            source = source_of(kind.forward)
            if all(part in source for part in _DEEPSEEK_FORM):
                override(module, partial(_lists_of_topk, module))
            elif "selected_token_mask" in source:
                override(module, partial(_lists_of_selected, module))


def source_of(function: Callable[..., Any]) -> str:
    """Return the source of a function, an empty text if there is none."""
    with suppress(OSError, TypeError):
        return inspect.getsource(function)
    return ""


def override(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Override the forward of a module that has no forward of its own yet, such as accelerate's."""
    module.__dict__.setdefault("forward", forward)


def hook(
    module: nn.Module, before: Callable[..., Any], after: Callable[..., Any] | None = None, **options: Any
) -> None:
    """Register hooks to call before and after a module's forward, unless they are there. options: those of
    `register_forward_hook`."""
    if before not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(before, with_kwargs=True)
    if after is not None and after not in module._forward_hooks.values():
        module.register_forward_hook(after, **options)


_DEEPSEEK_FORM = "= F.relu(scores)", "update_indexer(k, self.layer_idx)", "index_scores.topk(topk, dim=-1).indices"
"""Code of indexers of DeepSeek's form."""


def _lists_in_a_mask(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the lists of which a GLM5-Next layer makes its mask over pairs."""
    theirs, given = bound(layer, "build_attention_mask_from_topk", args, kwargs)
    if layer.config._attn_implementation != NAME:
        return theirs(**given)
    indices = given["topk_indices"]
    return Chosen(indices.masked_fill(indices >= given["kv_length"], -1)[:, None])


def _lists_of_selected(indexer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the lists of which a Qwen4 indexer makes its mask over pairs, as `Chosen`."""
    theirs, given = bound(indexer, "forward", args, kwargs)
    shown = given["attention_mask"]
    if not isinstance(shown, Shown):
        return theirs(**given)
    cache = given[_cache_name(given)]
    source = source_of(type(indexer).forward)
    plain = shown.is_causal and shown.window is None and indexer.index_kv_heads == 1
    if plain and all(part in source for part in _QWEN4_FORM):
        return Chosen(_lists_of_pools(indexer, shown, given["hidden_states"], given["position_embeddings"], cache))
    seen = Rows(shown).part(slice(0, shown.queries), shown.keys)
    seen = seen.expand(len(given["hidden_states"]), -1, -1)[:, None]
    return Chosen(_listed(theirs(**given | {"attention_mask": seen}) & seen))


_QWEN4_FORM = (
    "q = self.q_layernorm(q)",
    "pooled_keys = key_groups.float().mean(dim=1).to(raw_keys.dtype)",
    "pooled_keys = self.k_layernorm(pooled_keys)",
    "scores = torch.relu(scores).sum(dim=-1) / math.sqrt(self.index_head_dim)",
    "selected_block_indices = scores.topk(min(self.block_topk, num_complete_blocks), dim=0).indices",
)
"""Code of Qwen4's indexer, which does for one query after another what `_lists_of_pools` does for runs of them."""


@torch.no_grad()
def _lists_of_pools(indexer: Any, shown: Shown, x: Tensor, tables: tuple[Tensor, Tensor], cache: Any) -> Tensor:
    """Return the keys that a Qwen4 indexer selects: `(batch, 1, queries, k)`, -1 for none.

    The real tokens of a sample are cut into pools of `compress_ratio`. A query lists the tokens of the complete pools
    whose mean key scores most, and those after the last complete pool. x: `(batch, queries, hidden_size)`. tables:
    (cos, sin) of all keys.
    """
    batch, queries, _ = x.shape
    size = indexer.compress_ratio
    past = shown.q_start - shown.k_start
    query, keys = _queries_and_keys(indexer, x, tables, cache)
    lists = torch.full((batch, 1, queries, indexer.token_budget + size - 1), -1, device=x.device)
    place = torch.arange(past, past + queries, device=x.device)
    for sample, rows, token in _samples(shown, batch, past + queries, x.device):
        pools = token[: len(token) // size * size].view(-1, size)
        pooled = _pooled(indexer, keys[sample], pools, tables, sample)
        count = torch.searchsorted(token, place[rows], right=True)  # the tokens up to each query
        complete = count // size
        for number in complete.unique().tolist():  # all queries that have as many complete pools
            same = complete == number
            score = (query[sample, rows[same]] @ pooled[:number].mT).relu().sum(1)
            best = score.topk(min(indexer.block_topk, number), dim=-1).indices
            rest = _following(token, number * size, size - 1, count[same])
            found = torch.cat([pools[best].flatten(1), rest], 1)
            lists[sample, 0, rows[same], : found.shape[1]] = found
    return lists


def _queries_and_keys(indexer: Any, x: Tensor, tables: tuple[Tensor, Tensor], cache: Any) -> tuple[Tensor, Tensor]:
    """Return the rotated queries of a Qwen4 indexer, float32 `(batch, queries, heads, head_dim)`, and its keys so far
    as they are, `(batch, keys, head_dim)`."""
    heads = indexer.index_n_heads
    dim = indexer.index_head_dim
    cos, sin = (table[:, -x.shape[1] :] for table in tables)
    query, keys = indexer.index_qk_proj(x).split([heads * dim, dim], -1)
    query = indexer.q_layernorm(query.unflatten(-1, (heads, -1)))
    query = _rotate(indexer, query, cos=cos, sin=sin, unsqueeze_dim=2).float()
    if cache is not None:
        keys = cache.update_indexer(keys, indexer.layer_idx)
    return query, keys


def _pooled(indexer: Any, keys: Tensor, pools: Tensor, tables: tuple[Tensor, Tensor], sample: int) -> Tensor:
    """Return the key of each pool, float32 `(pools, head_dim)`; pools: the tokens of each, `(pools, size)`."""
    cos, sin = (table[sample, pools[:, 0]] for table in tables)
    mean = keys[pools].float().mean(1).to(keys.dtype)
    return _rotate(indexer, indexer.k_layernorm(mean)[:, None], cos=cos, sin=sin)[:, 0].float()


def _rotate(indexer: Any, x: Tensor, **tables: Any) -> Tensor:
    """Return x as the code of the indexer's model rotates it."""
    return sys.modules[type(indexer).__module__].apply_rotary_pos_emb(x, **tables)


def _following(token: Tensor, first: int, number: int, count: Tensor) -> Tensor:
    """Return entries `first` to `first + number - 1` of `token` for each query, `(queries, number)`; -1 for those after
    the first `count` of them, `(queries,)`."""
    place = first + torch.arange(number, device=token.device)
    entries = token[place.clamp(max=len(token) - 1)]
    return entries.expand(len(count), -1).masked_fill(place >= count[:, None], -1)


def _samples(shown: Shown, batch: int, stop: int, device: torch.device) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield for each sample (its row of the batch, its queries, its real tokens among the keys before `stop`)."""
    every = torch.ones(batch, stop, dtype=torch.bool, device=device)
    real = every if shown.hidden is None else ~shown.hidden[:, :stop]
    numbers = every.long() if shown.samples is None else shown.samples
    for row in range(batch):
        for number in numbers[row].unique():
            own = numbers[row] == number
            token = (own & real[row]).nonzero()[:, 0]
            if len(token):
                yield row, own[stop - shown.queries :].nonzero()[:, 0], token


def _listed(seen: Tensor) -> Tensor:
    """Return the places of the true entries of each row, -1 at the end: `(..., most of a row)`."""
    most = int(seen.sum(-1).max()) if seen.numel() else 0
    values, places = seen.to(torch.uint8).topk(most, dim=-1)
    return places.masked_fill(values == 0, -1)


_BIAS = "_bias_of_compressed_keys"
"""The attribute in which a DeepSeek-V4 layer holds its compressor's bias until its attention reads it."""


def _keep_bias(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what the compressor of a DeepSeek-V4 layer does, and keep its bias, which the layer drops."""
    out = type(layer.compressor).forward(layer.compressor, *args, **kwargs)
    if layer.config._attn_implementation == NAME:
        layer.__dict__[_BIAS] = out[1:]
    return out


def with_compressed(module: nn.Module, mask: Any, k: Tensor) -> Any:
    """Return the lists of a layer whose keys are followed by compressed ones; return any other mask as it is.

    A query sees the layer's own keys in its window, and the compressed keys where the bias is 0; without a bias all of
    them. k: `(batch, keys and compressed keys, ...)`.
    """
    kept = module.__dict__.pop(_BIAS, ())
    if not isinstance(mask, Shown) or getattr(module, "compressor", None) is None or k.shape[1] <= mask.keys:
        return mask
    if not kept or mask.window is None:
        raise UnsupportedError(
            f"{type(module).__name__} has compressed keys, and it is unknown which of them a query sees; load the "
            f'model with attn_implementation="{NAME}", or with "eager"'
        )
    (bias,) = kept
    window = torch.arange(mask.window, device=k.device)
    place = mask.q_start - mask.k_start + torch.arange(mask.queries, device=k.device)
    own = place[:, None] - window
    own = own.masked_fill(own >= mask.keys, -1)[None]
    own = own.masked_fill(~mask.sees(own), -1)
    if bias is None:
        count = k.shape[1] - mask.keys
        compressed = torch.arange(count, device=k.device).expand(len(k), mask.queries, -1)
    else:
        compressed = _listed(bias[:, 0] == 0)
    compressed = torch.where(compressed < 0, -1, compressed + mask.keys)
    return Chosen(torch.cat([own.expand(len(k), -1, -1), compressed], -1)[:, None], mask)


def _lists_of_topk(indexer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the keys that an indexer of DeepSeek's form lists, `(batch, queries, k)`; -1 at the end of early rows.

    Where it has few scores, it computes them as it does in transformers. Otherwise its forward gets `IndexKeys`, which
    computes tiles of them. The lists are the same but for scores that are equal, or round otherwise.
    """
    theirs, given = bound(indexer, "forward", args, kwargs)
    rows = given["attention_mask"]
    if not isinstance(rows, Rows):
        return theirs(**given)
    name = _cache_name(given)
    ranks = rows.shown.ranks
    if ranks is not None:
        shown, cache = ranks.index(rows.shown, indexer)
        rows = Rows(shown)
        given |= {"attention_mask": rows, name: cache}
    shown = rows.shown
    scores = len(given["hidden_states"]) * shown.queries * shown.keys * indexer.n_heads
    if scores <= SCORES or not shown.is_causal or torch.compiler.is_compiling():
        return theirs(**given | {"attention_mask": rows.part(slice(0, shown.queries), shown.keys)})
    stop = shown.q_start - shown.k_start + shown.queries
    return theirs(**given | {"attention_mask": IndexMask(rows), name: _NotedKeys(given[name], stop)})


class _NotedKeys:
    """Take the place of a cache in an indexer's forward, and return its keys so far, `stop` of them, as `IndexKeys`."""

    def __init__(self, cache: Any, stop: int) -> None:
        self.cache = cache
        self.stop = stop

    def update_indexer(self, new: Tensor, layer: int) -> IndexKeys:
        known = new if self.cache is None else self.cache.update_indexer(new, layer)
        return IndexKeys(known[:, : self.stop])  # a static cache returns its whole buffer


def _cache_name(given: dict[str, Any]) -> str:
    """Return the name of an argument that is the cache."""
    return "cache" if "cache" in given else "past_key_values"


def bound(layer: Any, method: str, args: Any, kwargs: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a method as a layer's class has it, and its arguments by name."""
    theirs = partial(getattr(type(layer), method), layer)
    given = inspect.signature(theirs).bind(*args, **kwargs)
    given.apply_defaults()
    return theirs, given.arguments
