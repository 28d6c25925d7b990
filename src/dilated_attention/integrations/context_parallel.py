"""Train transformers models on sequences that are sharded over ranks, by transformers' `Trainer` or TRL's `SFTTrainer`.

    class LongTrainer(ContextParallel, Trainer):
        pass

    trainer = LongTrainer(model, args, train_dataset=dataset, context_size=8)

Each group of `context_size` neighbouring ranks gets the same samples, and each of its ranks holds a shard of them. The
groups share out the samples as single ranks do without it. Losses, gradients, metrics and saved files are those of one
rank per group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention import UnsupportedError
from dilated_attention.integrations.over_ranks import ranks_of
from dilated_attention.integrations.sharded_batches import shard_batch, shifts_labels
from dilated_attention.parallel import cp_mean, set_context_parallel, unshard_sequence
from dilated_attention.plumbing import checks


class ContextParallel:
    """Shard the sequences of a `Trainer` over groups of ranks. Name it before the trainer's class.

    Works with DDP, FSDP, gradient accumulation, gradient checkpointing, LoRA and autocast. The model must have been
    loaded with `attn_implementation="dilated_attention"`, or be dilated.

    Args:
        context_size: the ranks that share a sequence; the number of all ranks must be a multiple. None: all ranks.
        transport: as in `attention`.

    Attributes:
        context_mesh: the 1-D mesh of the ranks that share this rank's sequences.

    Raises:
        ValueError: the sizes do not fit, `args.average_tokens_across_devices` is off, labels are smoothed, or a
            `compute_loss_func` is given.
        UnsupportedError: DeepSpeed, or a `ParallelismConfig` with `cp_size` or `sp_size` above 1: their hooks drop the
            masks of windows and chunks.
    """

    def __init__(self, *args: Any, context_size: int | None = None, transport: str = "auto", **kwargs: Any) -> None:
        self._context_size = context_size
        super().__init__(*args, **kwargs)
        trainer: Any = self
        if not trainer.args.average_tokens_across_devices:
            raise ValueError("average_tokens_across_devices must be True: the loss is a mean over all ranks' tokens")
        if trainer.args.label_smoothing_factor or trainer.compute_loss_func is not None:
            raise ValueError(
                "label_smoothing_factor and compute_loss_func would see a shard alone; leave them out, or set the "
                "model's own loss"
            )
        set_context_parallel(trainer.model, self.context_mesh, transport)

    def create_accelerator_and_postprocess(self) -> None:
        trainer: Any = self
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator = trainer.accelerator
        _require_own_masks(accelerator)
        ranks = accelerator.num_processes
        size = ranks if self._context_size is None else checks.positive("context_size", self._context_size)
        if ranks % size or not dist.is_initialized():
            raise ValueError(f"context_size={size} does not divide the {ranks} ranks; start it by torchrun")
        # The names are Accelerate's, whose data loaders give ranks along "cp" the same samples.
        self._meshes = init_device_mesh(
            accelerator.device.type, (ranks // size, size), mesh_dim_names=("dp_replicate", "cp")
        )
        self.context_mesh = self._meshes["cp"]
        prepare = accelerator.prepare_data_loader

        def prepared(*args: Any, **kwargs: Any) -> Any:
            before = accelerator.state.device_mesh
            accelerator.state.device_mesh = self._meshes
            try:
                return prepare(*args, **kwargs)
            finally:
                accelerator.state.device_mesh = before

        accelerator.prepare_data_loader = prepared

    def get_cp_size(self) -> int:
        """Return the number of ranks that share a sequence, by which `Trainer` divides what it counts on all ranks."""
        return self.context_mesh.size()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        trainer: Any = self
        unwrapped = trainer.accelerator.unwrap_model(model)
        shard = shard_batch(inputs, self.context_mesh, shift=shifts_labels(unwrapped))
        shard.pop("num_items_in_batch", None)  # of this batch alone; the trainer's is of all that it accumulates
        over = ranks_of(unwrapped)
        assert over is not None
        over.left_sums = False
        found = super().compute_loss(  # type: ignore[misc]
            model, shard, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        loss = found[0] if return_outputs else found
        if over.left_sums:  # TRL's loss is the sum over this rank's tokens, divided by the number of all
            if not unwrapped.training:
                loss = self._mean(loss, shard, num_items_in_batch)
        elif num_items_in_batch is not None and trainer.model_accepts_loss_kwargs:
            loss = loss / self.context_mesh.size()  # `Trainer` multiplies it by the number of all ranks
        return (loss, found[1]) if return_outputs else loss

    def _mean(self, loss: Tensor, shard: dict[str, Any], num_items_in_batch: Any) -> Tensor:
        """Return the mean loss of a group's tokens. loss: the sum of this rank's tokens over the number of all, times
        the number of ranks; or, without `num_items_in_batch`, their mean."""
        if num_items_in_batch is not None:
            return cp_mean(loss, 1, self.context_mesh)
        count = (shard["shift_labels"] != -100).sum()
        return cp_mean(loss * count, count, self.context_mesh)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if "labels" not in inputs:
            raise UnsupportedError("evaluation over a mesh needs labels; predict on whole sequences without a mesh")
        tokens = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if isinstance(logits, Tensor):
            logits = unshard_sequence(logits, self.context_mesh, seq_len=tokens.shape[1])
        elif logits is not None:
            raise UnsupportedError(
                f"the model returns {len(logits)} things beside its loss; give prediction_loss_only=True"
            )
        return loss, logits, labels

    @property
    def gather_function(self) -> Callable[..., Any]:
        """Return what gathers losses and predictions in an evaluation: one rank of each group speaks for its group."""
        return self._gathered

    @gather_function.setter
    def gather_function(self, function: Callable[..., Any]) -> None:
        """Ignore what `Trainer` sets: it is always the accelerator's `gather_for_metrics`, which `_gathered` calls."""

    def _gathered(self, data: Any, use_gather_object: bool = False) -> Any:
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        gather = accelerator.gather

        def of_groups(tensors: Any) -> Any:
            if not isinstance(tensors, Tensor):
                return type(tensors)(of_groups(x) for x in tensors)
            every = gather(tensors)
            return every.unflatten(0, (accelerator.num_processes, -1))[:: self.context_mesh.size()].flatten(0, 1)

        accelerator.gather = of_groups
        try:
            return accelerator.gather_for_metrics(data, use_gather_object)
        finally:
            del accelerator.gather


def _require_own_masks(accelerator: Any) -> None:
    """Raise UnsupportedError where Accelerate itself shards the sequence, and drops masks."""
    config = getattr(accelerator, "parallelism_config", None)
    for name in ("cp_size", "sp_size"):
        size = getattr(config, name, 1)
        if size > 1:
            raise UnsupportedError(
                f"ParallelismConfig({name}={size}): Accelerate's hooks drop the masks of windows and chunks; leave it "
                f"at 1, and give the trainer context_size={size}"
            )
    if accelerator.distributed_type == "DEEPSPEED":
        raise UnsupportedError(
            "Trainer with DeepSpeed over a mesh is not supported: use FSDP, or DeepSpeed's engine with shard_batch"
        )
