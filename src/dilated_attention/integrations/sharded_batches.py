"""Cut batches for ranks that each hold a shard of the sequence, and compute the mean loss of all their tokens."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from transformers import PreTrainedModel

from dilated_attention import UnsupportedError
from dilated_attention.integrations.locality import active
from dilated_attention.parallel import cp_mean, sequence_range, shard_labels, shard_sequence
from dilated_attention.plumbing import Mesh, checks, context_group

SHIFTED = {"ForCausalLM", "ForConditionalGeneration", None}
NOT_SHIFTED = {"ForMaskedLM", "ForTokenClassification"}
"""The values of `loss_type` of models whose labels are, or are not, next tokens. transformers takes None for the
first."""


def shifts_labels(model: nn.Module) -> bool:
    """Return whether a model's labels are next tokens."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return getattr(module, "loss_type", None) in SHIFTED
    return True


@dataclass(eq=False)
class GlobalLoss:
    """Compute the mean loss of all ranks' tokens in place of a transformers loss function.

    Attributes:
        mesh: the ranks that share a sequence.
        shifts: whether labels are next tokens; the labels are then those of `shift_labels`.
    """

    mesh: DeviceMesh
    shifts: bool

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        *others: Any,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        targets = shift_labels if self.shifts else labels
        assert targets is not None  # a forward without them is refused
        targets = targets.to(logits.device).flatten()
        total = F.cross_entropy(
            logits.float().flatten(0, -2), targets, ignore_index=ignore_index, reduction="sum"
        )  # in float32, as transformers computes it
        count: Any = (targets != ignore_index).sum()
        if num_items_in_batch is not None:  # the same on every rank, which adds them up
            count = torch.as_tensor(num_items_in_batch, device=logits.device).double() / self.mesh.size()
        forward = active()
        if forward is not None:
            forward.made_loss = True
        return cp_mean(total, count, self.mesh)


def shard_batch(
    batch: Mapping[str, Any], mesh: Mesh, *, shift: bool = True, ignore_index: int = -100
) -> dict[str, Any]:
    """Return this rank's part of a batch that every rank of the mesh holds whole.

    Tensors with the sequence's length in dimension 1 are cut to the tokens `parallel.sequence_range`; shards differ by
    at most one token. The result holds besides:

    - `position_ids`, made if they are missing. Samples packed as `cu_seq_lens_q` says get positions that restart.
    - `shift_labels`, the label of each token's successor, which may lie on the next rank.
    - `num_items_in_batch`, the number of labels on all ranks.

    `pixel_values` and `image_sizes` stay whole: each rank embeds all images. A warning names what else was not cut.

    Args:
        batch: `input_ids` or `inputs_embeds`, `(batch, seq, ...)`, and what a tokenizer or collator gives beside them.
        shift: whether labels are next tokens; False for masked language models and token classification.
        ignore_index: labels of this value do not count.

    Raises:
        ValueError: the batch has no tokens, or fewer than the mesh has ranks; or `attention_mask` is over pairs.
    """
    batch = dict(batch)
    inputs = batch.get("input_ids")
    if inputs is None:
        inputs = batch.get("inputs_embeds")
    if not isinstance(inputs, Tensor) or inputs.ndim < 2:
        raise ValueError(f"batch must hold input_ids or inputs_embeds, (batch, seq, ...); it has {', '.join(batch)}")
    rows, seq_len = inputs.shape[:2]
    ranks = dist.get_world_size(context_group(mesh))
    if seq_len < ranks:
        raise ValueError(f"a sequence of {seq_len} tokens is shorter than the {ranks} ranks of the mesh; pad it")
    mask = batch.get("attention_mask")
    if mask is not None and tuple(mask.shape) != (rows, seq_len):
        raise UnsupportedError(
            f"attention_mask must be (batch, seq) = {(rows, seq_len)}; got {tuple(mask.shape)}, over pairs of tokens: "
            "give a mask over tokens, or position_ids that restart with each packed sample"
        )
    batch["position_ids"] = _positions(batch, rows, seq_len, inputs.device)
    start, stop = sequence_range(seq_len, mesh)
    found: dict[str, Any] = {}
    whole = []
    for name, x in batch.items():
        if not isinstance(x, Tensor) or x.ndim == 0:
            found[name] = x
        elif name == "position_ids":
            found[name] = shard_sequence(x, mesh, x.ndim - 1)
        elif name in ("pixel_values", "image_sizes"):
            found[name] = x
        elif x.ndim > 1 and x.shape[0] in (1, rows) and x.shape[1] == seq_len:
            found[name] = x[:, start:stop]
        else:
            found[name] = x
            whole.append(f"{name} {tuple(x.shape)}")
    if whole:
        warnings.warn(
            f"shard_batch did not cut {', '.join(whole)}: dimension 1 is not that of the {seq_len} tokens",
            stacklevel=checks.outside(),
        )
    labels = batch.get("labels")
    if labels is not None:
        own = labels
        if shift:
            found["shift_labels"] = shard_labels(labels, mesh, ignore_index)
            own = labels[:, 1:]
        found.setdefault("num_items_in_batch", (own != ignore_index).sum())
    return found


_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def _positions(batch: dict[str, Any], rows: int, seq_len: int, device: torch.device) -> Tensor:
    """Return the positions of all tokens, and take the other descriptions of packed samples out of the batch."""
    positions = batch.get("position_ids")
    bounds = batch.get("cu_seq_lens_q")
    for name in _PACKED:
        batch.pop(name, None)
    place = torch.arange(seq_len, device=device)[None]
    if bounds is None:
        return place if positions is None else positions
    first = torch.zeros(rows * seq_len, dtype=torch.int64, device=device)
    begins = bounds[:-1].long().to(device)
    first[begins] = begins
    counted = torch.arange(rows * seq_len, device=device) - first.cummax(0).values
    counted = counted.view(rows, seq_len)
    if positions is not None and positions.ndim == 2 and not torch.equal(positions.expand_as(counted), counted):
        raise ValueError("position_ids do not restart where cu_seq_lens_q begins a sample: give one of them alone")
    return counted if positions is None else positions
