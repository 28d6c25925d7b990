"""One training step on eight processes, 2 x 2 x 2: samples, sequence and heads over one axis each, against one process.

    torchrun --nproc-per-node=8 examples/data_context_tensor.py
    torchrun --nproc-per-node=8 examples/data_context_tensor.py 1 4 2     # data, context, tensor

Tensor parallel: PyTorch's `parallelize_module` cuts the projections, so that a rank has half of the heads;
`head_offset` tells attention which. Context parallel: `mesh=` makes attention exact over the shards of a sequence. Data
parallel: gradients are added up over data and context ranks, and `cp_mean` makes that the gradient of the global mean.
One rank of those that share a sample draws it, and sends it to the others.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dilated_attention import Dilated, attention
from dilated_attention.parallel import cp_mean, shard_labels, shard_sequence

DIM, HEADS, SEQ_LEN, WORDS = 32, 4, 256, 64
PATTERN = Dilated((32, 128, 256), (1, 2, 4))


class Block(nn.Module):
    """Causal self-attention and an MLP, of this rank's heads and channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor, mesh: DeviceMesh | None) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (-1, DIM // HEADS)) for part in (self.q, self.k, self.v))
        where = {}
        if mesh is not None:
            first = mesh["tensor"].get_local_rank() * k.shape[2]  # of this rank's heads, among all
            where = {"mesh": mesh["context"], "seq_len": SEQ_LEN, "head_offset": first}
        x = x + self.out(attention(q, k, v, PATTERN, is_causal=True, **where).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(WORDS, DIM), nn.ModuleList(Block() for _ in range(2))
        self.logits = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mesh)
        return self.logits(x)


def losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over this rank's valid tokens, and their number."""
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def batch(samples: int, seed: int) -> Tensor:
    return torch.randint(WORDS, (samples, SEQ_LEN), generator=torch.Generator().manual_seed(seed))


def one_process(data: int) -> tuple[float, dict[str, Tensor]]:
    """The loss of the whole batch, and the parameters after the step."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.cat([batch(1, seed) for seed in range(data)])
    labels = torch.cat([tokens[:, 1:], torch.full((data, 1), -100)], 1)
    total, count = losses(model(tokens), labels)
    loss = total / count
    loss.backward()
    optimizer.step()
    return loss.item(), {name: parameter.detach() for name, parameter in model.named_parameters()}


def main(data: int = 2, context: int = 2, tensor: int = 2) -> tuple[float, float]:
    """Return the loss, and the largest difference of it or of a parameter after the step from one process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (data, context, tensor), mesh_dim_names=("data", "context", "tensor"))
    reduced = mesh["data", "context"]._flatten("data_context")  # over which gradients are added up
    sharing = mesh["context", "tensor"]._flatten("context_tensor")  # the ranks that work on one sample

    torch.manual_seed(0)
    model = Model().to(device)
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {"q": columns, "k": columns, "v": columns, "out": rows, "up": columns, "down": rows}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    tokens = torch.empty(1, SEQ_LEN, dtype=torch.int64, device=device)
    if sharing.get_local_rank() == 0:
        tokens.copy_(batch(1, seed=mesh["data"].get_local_rank()))
    dist.broadcast(tokens, group=sharing.get_group(), group_src=0)

    labels = shard_labels(tokens, mesh["context"])
    total, count = losses(model(shard_sequence(tokens, mesh["context"]), mesh), labels)
    loss = cp_mean(total, count, reduced, gradients="sum")
    loss.backward()
    for parameter in model.parameters():
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        dist.all_reduce(gradient, group=reduced.get_group())
    optimizer.step()

    expected_loss, expected = one_process(data)
    differences = [abs(loss.item() - expected_loss)]
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        differences.append((whole.detach().cpu() - expected[name]).abs().max().item())
    return loss.item(), max(differences)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    loss, difference = main(*map(int, sys.argv[1:]))
    if dist.get_rank() == 0:
        print(f"loss {loss:.4f}; largest difference to one process {difference:.1e}")
    dist.destroy_process_group()
