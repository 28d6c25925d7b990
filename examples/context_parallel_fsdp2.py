"""Parameters sharded over all ranks (FSDP2), samples over one axis of the mesh, sequences over the other.

    torchrun --nproc-per-node=2 examples/context_parallel_fsdp2.py
    torchrun --nproc-per-node=8 examples/context_parallel_fsdp2.py 4     # 2 samples, 4 ranks each

FSDP2 averages gradients over the flattened mesh; `cp_mean` scales the loss so that this average is the gradient of the
global mean over valid tokens, however unevenly labels fall on the shards.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dilated_attention import Dilated
from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.parallel import cp_mean, set_context_parallel, shard_labels, shard_sequence

SEQ_LEN = 512


def main(context: int | None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    size = dist.get_world_size()
    context = size if context is None else context
    mesh = init_device_mesh(device, (size // context, context), mesh_dim_names=("data", "context"))
    everyone = mesh["data", "context"]._flatten("data_context")

    torch.manual_seed(0)
    config = LongNetConfig(embed_dim=64, num_layers=2, num_heads=4, pattern=Dilated((64, 256, 512), (1, 4, 8)))
    model = LongNetLM(config).to(device)
    set_context_parallel(model, mesh["context"])
    for block in model.blocks:
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + mesh["data"].get_local_rank())  # each row of the mesh has its own sample
    tokens = torch.randint(256, (1, SEQ_LEN), device=device)
    prompt = torch.arange(SEQ_LEN, device=device) < 200  # not trained on
    labels = shard_labels(tokens.masked_fill(prompt, -100), mesh["context"])
    inputs = shard_sequence(tokens, mesh["context"])
    for step in range(3):
        logits = model(inputs, seq_len=SEQ_LEN)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = cp_mean(total, (labels != -100).sum(), everyone)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: {loss.item():.4f} nats a byte")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else None)
