"""Training steps of a transformers model with windows, over a sequence that no rank holds whole.

    torchrun --nproc-per-node=2 examples/transformers_context.py

The model keeps its own attention. Each rank holds a shard of the tokens and receives only the rows that a window needs.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group is made: see "When something is wrong" in docs/parallel.md
from torch.distributed.device_mesh import init_device_mesh
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from dilated_attention.integrations.huggingface import NAME, exchange_plan, shard_batch
from dilated_attention.parallel import set_context_parallel

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]


def main(tokens: int = 1001, steps: int = 3) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))

    torch.manual_seed(0)
    config = Gemma3TextConfig(**SIZES, num_hidden_layers=3, layer_types=LAYERS, sliding_window=128, vocab_size=256)
    model = Gemma3ForCausalLM._from_config(config, attn_implementation=NAME).to(device)
    set_context_parallel(model, mesh)
    if dist.get_rank() == 0:
        print(exchange_plan(model, tokens, mesh.size()))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.randint(256, (1, tokens), device=device)  # the same on every rank
    for step in range(steps):
        loss = model(**shard_batch({"input_ids": text, "labels": text}, mesh)).loss
        loss.backward()
        for parameter in model.parameters():  # as DDP and FSDP do
            dist.all_reduce(parameter.grad)
            parameter.grad /= mesh.size()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: {loss.item():.4f} nats a token")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
