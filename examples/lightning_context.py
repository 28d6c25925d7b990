"""A model over a sharded sequence, trained under Lightning.

    torchrun --nproc-per-node=2 examples/lightning_context.py

All processes hold one sample together, so its gradients are averaged over all of them: what Lightning's `ddp` does. But
each must be given the same tokens, so that the sampler must not deal them out: `use_distributed_sampler=False`.
"""

import gc
import os

import lightning
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group is made: see "When something is wrong" in docs/parallel.md
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from dilated_attention import Dilated
from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.parallel import set_context_parallel


class Learner(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = LongNetLM(
            LongNetConfig(embed_dim=64, num_layers=2, num_heads=4, pattern=Dilated((64, 256), (1, 4)))
        )
        self.losses: list[float] = []

    def setup(self, stage: str) -> None:
        if self.trainer.world_size > 1:
            mesh = init_device_mesh(self.device.type, (self.trainer.world_size,), mesh_dim_names=("context",))
            set_context_parallel(self.model, mesh)

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = self.model.loss(tokens)
        self.losses.append(loss.item())
        self.print(f"step {self.global_step}: {self.losses[-1]:.4f} nats a byte")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(steps: int = 3) -> list[float]:
    lightning.seed_everything(0, verbose=False)
    learner, texts = Learner(), torch.randint(256, (steps, 513))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        max_epochs=1, devices=ranks, num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")), accelerator="auto",
        strategy="ddp" if ranks > 1 else "auto", use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(learner, DataLoader(texts, batch_size=1))
    losses = learner.losses
    # Lightning leaves a group of gloo to the end of the process, which gloo's threads may then abort. The wrapped model
    # goes before it: see "When something is wrong" in docs/parallel.md.
    del trainer, learner
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
