"""Generate with a transformers model over ranks, which read a long prompt together. Each keeps its shard of the keys.

A new token attends on every rank to the keys that this rank keeps; the partial results (out, lse) are gathered and
merged. All ranks compute everything else of a new token alike. Its keys go to the last rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilated_attention import UnsupportedError, attention, merge
from dilated_attention.integrations.forward_over_ranks import Keys, OverRanks, layer_name
from dilated_attention.integrations.locality import ACTIVE
from dilated_attention.integrations.over_ranks import ranks_of
from dilated_attention.integrations.own_attention import Shown, pattern_of_shown
from dilated_attention.integrations.sharded_batches import shard_batch
from dilated_attention.models import sample
from dilated_attention.plumbing import checks, from_rank, require_same


@dataclass(eq=False)
class _Step:
    """Take the place of a `Forward` for one new token.

    Attributes:
        position: the token's position.
        stop: a position after all that will come.
        prompt, newest: for each layer, the keys that this rank keeps of the prompt, and of new tokens.
    """

    over: OverRanks
    position: int
    stop: int
    prompt: dict[nn.Module, Keys]
    newest: dict[nn.Module, Keys]

    @property
    def start(self) -> int:
        return self.position

    def described(self, shown: Shown) -> Shown:
        return replace(shown, samples=None, q_start=self.position, k_start=self.position, ranks=self)

    def attend(
        self, shown: Shown, q: Tensor, k: Tensor, v: Tensor, layer: nn.Module, *, sinks: Tensor | None, indices: None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """Return the attention of a new token, q `(batch, 1, heads, head_dim)`, over all ranks' keys."""
        link = self.over.link
        if link.rank == link.size - 1:
            before = self.newest.get(layer, Keys(k[:, :0], v[:, :0], self.position))
            self.newest[layer] = before.followed_by(k, v)
        whole = replace(shown, q_start=0, k_start=0, queries=self.stop, keys=self.stop)
        pattern, _ = pattern_of_shown(whole, 0, self.stop)
        options |= {"is_causal": True, "return_lse": True, "q_start": self.position}
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        lse = torch.full((q.shape[0], q.shape[2], 1), -torch.inf, dtype=torch.float32, device=q.device)
        for held in (self.prompt[layer], self.newest.get(layer)):
            if held is not None and held.k.shape[1]:
                out, lse = merge(out, lse, *attention(q, held.k, held.v, pattern, k_start=held.first, **options))

        own = torch.cat([out.float(), lse.transpose(1, 2)[..., None].float()], -1)
        link.enter(layer_name(layer) or type(layer).__name__)
        every = link.whole(own[None].contiguous(), range(link.size + 1), "while gathering partial results")
        of_ranks = every[..., -1:]
        if sinks is not None:  # a key without a value
            of_sinks = sinks.float()[None, None, None, :, None].expand_as(of_ranks[:1])
            of_ranks = torch.cat([of_ranks, of_sinks])
        weights = of_ranks.softmax(0)[: link.size]
        return (weights * every[..., :-1]).sum(0).to(q.dtype)

    def attend_dilated(self, *arguments: Any, **options: Any) -> NoReturn:
        raise UnsupportedError("generation of a dilated model over a mesh is not supported; leave the mesh out")


@torch.no_grad()
def generate_over_ranks(
    model: PreTrainedModel,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return prompts, each followed by new tokens, from a model that `set_context_parallel` gave a mesh.

    Every rank passes the same whole prompts, reads its shard of them and keeps the keys of this shard that later tokens
    see. All ranks return the same tokens, which are those of one device.

    Args:
        input_ids: `(batch, seq)`, prompts of one length, without padding.
        do_sample: draw tokens, on the first rank; False: take the most likely ones.
        temperature, top_k, top_p: as in transformers' `generate`, see `models.sample`.
        eos_token_id: the token that ends a sample; it is repeated until all samples have ended.
        generator: the generator of the first rank.

    Raises:
        ValueError: the model has no mesh or is in training mode, or the ranks pass different prompts.
        UnsupportedError: a dilated model.
    """
    over = ranks_of(model)
    if over is None:
        raise ValueError("the model has no mesh: call set_context_parallel(model, mesh) first")
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    if over.is_dilated:
        raise UnsupportedError("generation of a dilated model over a mesh is not supported; leave the mesh out")
    if over.chooses:
        raise UnsupportedError(
            "generation of a model that chooses its keys over a mesh is not supported; leave the mesh out"
        )
    max_new_tokens = checks.integer("max_new_tokens", max_new_tokens, 0)
    require_same("generate_over_ranks", over.mesh, input_ids, max_new_tokens=max_new_tokens, do_sample=do_sample)
    if not max_new_tokens:
        return input_ids

    if not do_sample:
        temperature = 0.0
    draw = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
    logits, prompt = _read(model, over, input_ids)
    newest: dict[nn.Module, Keys] = {}
    ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    tokens = input_ids
    while True:
        chosen = from_rank(0, draw(logits), over.mesh)
        if eos_token_id is not None:
            chosen = chosen.masked_fill(ended, eos_token_id)
            ended |= chosen == eos_token_id
        tokens = torch.cat([tokens, chosen[:, None].to(tokens.dtype)], 1)
        count = tokens.shape[1]
        if count == input_ids.shape[1] + max_new_tokens or (eos_token_id is not None and bool(ended.all())):
            return tokens
        step = _Step(over, count - 1, input_ids.shape[1] + max_new_tokens, prompt, newest)
        place = torch.full((1, 1), count - 1, device=tokens.device)
        before = ACTIVE.set(step)
        try:
            logits = model(input_ids=tokens[:, -1:], position_ids=place, use_cache=False).logits[:, -1]
        finally:
            ACTIVE.reset(before)


def _read(model: PreTrainedModel, over: OverRanks, input_ids: Tensor) -> tuple[Tensor, dict[nn.Module, Keys]]:
    """Return the logits after the prompts, and the keys of this rank's shard that later tokens see, for each layer."""
    over.kept = {}
    try:
        shard = shard_batch({"input_ids": input_ids}, over.mesh)
        logits = model(**shard, logits_to_keep=1).logits[:, -1]
        return from_rank(over.link.size - 1, logits, over.mesh), over.kept
    finally:
        over.kept = None
