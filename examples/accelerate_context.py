"""A model over a sharded sequence, trained under Hugging Face Accelerate.

    accelerate launch --num-processes=2 examples/accelerate_context.py

All processes hold one sample together, so its gradients are averaged over all of them: what Accelerate's
DistributedDataParallel does. But each must be given the same tokens, so that no data loader goes through `prepare`.
"""

import torch
import torch.distributed.nn.functional  # before the group is made: see "When something is wrong" in docs/parallel.md
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention import Dilated
from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.parallel import set_context_parallel


class Learner(nn.Module):
    """The loss as a module's forward, which is where DistributedDataParallel looks on."""

    def __init__(self, model: LongNetLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model.loss(tokens)


def main(steps: int = 3) -> list[float]:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = LongNetLM(LongNetConfig(embed_dim=64, num_layers=2, num_heads=4, pattern=Dilated((64, 256), (1, 4))))
    if accelerator.num_processes > 1:
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,), mesh_dim_names=("context",))
        set_context_parallel(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    learner, optimizer = accelerator.prepare(Learner(model), optimizer)
    losses = []
    for step in range(steps):
        tokens = broadcast(torch.randint(256, (1, 513), device=accelerator.device))  # the first process draws
        loss = learner(tokens)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.print(f"step {step}: {losses[-1]:.4f} nats a byte")
    # The wrapped model goes before its group: see "When something is wrong" in docs/parallel.md.
    learner, optimizer = accelerator.free_memory(learner, optimizer)
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
