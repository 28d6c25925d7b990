"""Attention and a training step over a sequence that no rank holds whole.

    torchrun --nproc-per-node=2 examples/context_parallel.py

Every rank holds a contiguous shard of q, k and v. The call is the same as on one device, with `mesh=` added, and so is
its result.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group is made: see "When something is wrong" in docs/parallel.md
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention import Dilated, dilated_attention, explain
from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.parallel import sequence_range, set_context_parallel, shard_sequence

SEQ_LEN = 1000  # no multiple of anything
SEGMENTS, RATES = (64, 256, 1024), (1, 4, 8)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("context",))

    # Real data would be read by shard; here every rank draws the same whole sequence, to compare.
    torch.manual_seed(0)
    whole = [torch.randn(1, SEQ_LEN, 8, 32) for _ in range(3)]
    q, k, v = (shard_sequence(x, mesh).to(device) for x in whole)
    out = dilated_attention(q, k, v, SEGMENTS, RATES, is_causal=True, mesh=mesh, seq_len=SEQ_LEN)

    right = shard_sequence(dilated_attention(*whole, SEGMENTS, RATES, is_causal=True), mesh)
    error = (out.cpu() - right).abs().max().item()
    line = f"rank {dist.get_rank()} holds tokens {sequence_range(SEQ_LEN, mesh)}: largest difference {error:.1e}\n"
    print(line, end="")  # in one write: under torchrun all ranks write to one unbuffered stream
    if dist.get_rank() == 0:
        print(explain(q, k, v, Dilated(SEGMENTS, RATES), is_causal=True, mesh=mesh, seq_len=SEQ_LEN))

    # A model: its attention, positions and loss know the mesh; gradients are averaged over it as in data parallelism.
    config = LongNetConfig(embed_dim=64, num_layers=2, num_heads=4, pattern=Dilated((64, 256), (1, 4)))
    model = LongNetLM(config).to(device)
    set_context_parallel(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(256, (1, 513), device=device)
    for step in range(3):
        loss = model.loss(tokens)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= mesh.size()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: {loss.item():.4f} nats a byte")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
