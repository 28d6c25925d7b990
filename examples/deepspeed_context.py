"""A model over a sharded sequence, trained under DeepSpeed, all of its state sharded too (ZeRO 3).

    torchrun --nproc-per-node=2 examples/deepspeed_context.py

All processes hold one sample together, so its gradients are averaged over all of them: what DeepSpeed does with the
processes that it takes for replicas. But each must be given the same tokens, so that `initialize` is given no data.
"""

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group is made: see "When something is wrong" in docs/parallel.md
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention import Dilated
from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.parallel import set_context_parallel

SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
}


class Learner(nn.Module):
    """The loss as a module's forward, which is what DeepSpeed calls."""

    def __init__(self, model: LongNetLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model.loss(tokens)


def main(steps: int = 3) -> list[float]:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = LongNetLM(LongNetConfig(embed_dim=64, num_layers=2, num_heads=4, pattern=Dilated((64, 256), (1, 4))))
    device = deepspeed.get_accelerator().device_name()
    set_context_parallel(model, init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("context",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=Learner(model), optimizer=optimizer, config=SETTINGS)
    losses = []
    for step in range(steps):
        tokens = torch.randint(256, (1, 513), device=engine.device)
        dist.broadcast(tokens, 0)  # the first process draws
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step}: {losses[-1]:.4f} nats a byte")
    engine.destroy()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
