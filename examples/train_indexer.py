"""A small model of DeepSeek's form learns to choose its keys: dense first, then with an indexer in each layer.

As DeepSeek-V3.2 was made: a dense language model is trained; its indexers learn, beside the frozen model, where its
attention falls; then the model goes on over the keys that they choose. The same model, trained on densely over the same
text, shows what the choice costs. No step forms a matrix of tokens x tokens.
"""

from __future__ import annotations

import argparse
import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention import Dilated, attention
from dilated_attention.nn import rotary_tables, rotate
from dilated_attention.routing import Indexer
from dilated_attention_lab.training.text import Split, read_text

CONTEXT = 512
CHOSEN = 64
HEADS = 4
HEAD_DIM = 24
WIDTH = HEADS * HEAD_DIM
INDEX_DIM = 16


class Attended(NamedTuple):
    """Hold what the indexer of a layer learns from: the layer's normed input, and its rotated queries and keys."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


class Block(nn.Module):
    """Attend and transform, each after a norm. Keys and values come from one short vector per token, as in MLA."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.latent = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.key_value = nn.Linear(WIDTH // 2, 2 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.before_mlp = nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.indexer = Indexer(WIDTH, num_heads=4, head_dim=INDEX_DIM, top_k=CHOSEN, recent=1)

    def attended(self, x: Tensor) -> Attended:
        normed = self.before_attention(x)
        q = self.query(normed).unflatten(-1, (HEADS, -1))
        k, v = self.key_value(self.latent(normed)).unflatten(-1, (2, HEADS, -1)).unbind(2)
        tables = rotary_tables(torch.arange(x.shape[1]), HEAD_DIM)
        return Attended(normed, rotate(q, tables), rotate(k, tables), v)

    def forward(self, x: Tensor, is_sparse: bool) -> tuple[Tensor, Attended]:
        seen = self.attended(x)
        pattern = Dilated((x.shape[1],), (1,))  # one segment: dense
        if is_sparse:
            pattern = self.indexer(seen.x, tables=index_tables(x))
        x = x + self.out(attention(*seen[1:], pattern, is_causal=True).flatten(2))
        return x + self.mlp(self.before_mlp(x)), seen


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.norm = nn.RMSNorm(WIDTH)
        self.logits = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor, is_sparse: bool) -> tuple[Tensor, list[Attended]]:
        """Return the loss in bits per byte, and what each layer's indexer learns from."""
        x = self.embedding(tokens[:, :-1].long())
        layers = []
        for block in self.blocks:
            x, seen = block(x, is_sparse)
            layers.append(seen)
        logits = self.logits(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].long().flatten()) / 0.6931, layers

    def index_loss(self, layers: list[Attended]) -> Tensor:
        """Return how far the indexers are from the attention, KL in nats per query, summed over layers."""
        pairs = zip(self.blocks, layers, strict=True)
        return sum(block.indexer.loss(s.x, s.q, s.k, tables=index_tables(s.x)) for block, s in pairs)

    @torch.no_grad()
    def held(self, tokens: Tensor) -> float:
        """Return the share of the dense attention that falls on the chosen keys, averaged over heads and queries."""
        shares = []
        for block, seen in zip(self.blocks, self(tokens, False)[1], strict=True):
            chosen = block.indexer(seen.x, tables=index_tables(seen.x))
            dense = Dilated((seen.x.shape[1],), (1,))
            options = {"is_causal": True, "return_lse": True}
            lse = [attention(*seen[1:], pattern, **options)[1] for pattern in (chosen, dense)]
            shares.append((lse[0] - lse[1]).exp().mean())
        return float(torch.stack(shares).mean())


def index_tables(x: Tensor) -> tuple[Tensor, Tensor]:
    return rotary_tables(torch.arange(x.shape[1]), INDEX_DIM)


def train(model: Model, split: Split, steps: int, stage: str, seed: int) -> None:
    """Train the dense model, its indexers beside it ("warm-up"), or both over the chosen keys ("sparse")."""
    indexers = [x for name, x in model.named_parameters() if "indexer" in name]
    others = [x for name, x in model.named_parameters() if "indexer" not in name]
    learning = {"dense": others, "warm-up": indexers, "sparse": indexers + others}[stage]
    rate = 1e-2 if stage == "warm-up" else 2e-3
    optimizer = torch.optim.AdamW(learning, lr=rate)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 10, (steps - step) / steps * 2)
        tokens = split.batch(4, generator)
        with torch.set_grad_enabled(stage != "warm-up"):
            loss, layers = model(tokens, stage == "sparse")
        if stage == "warm-up":
            loss = model.index_loss(layers)
        elif stage == "sparse":
            loss = loss + model.index_loss(
                layers
            )  # the indexers' loss has no gradient for the model, nor the other way
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(steps: int = 100, layers: int = 2) -> dict[str, float]:
    torch.manual_seed(0)
    split = read_text([]).split(CONTEXT)
    held_out = split.sample_held_out(16)
    model = Model(layers)

    def bits(model: Model, is_sparse: bool) -> float:
        with torch.no_grad():
            return float(model(held_out, is_sparse)[0])

    train(model, split, steps, "dense", 0)
    found = {"bits per byte, dense": bits(model, False)}
    found["bits per byte, keys chosen by untrained indexers"] = bits(model, True)
    found["attention held by untrained indexers"] = model.held(held_out)
    train(model, split, steps // 2, "warm-up", 1)
    found["bits per byte, keys chosen after the warm-up"] = bits(model, True)
    found["attention held after the warm-up"] = model.held(held_out)
    dense = copy.deepcopy(model)
    train(model, split, steps // 2, "sparse", 2)
    found["bits per byte, trained on over the chosen keys"] = bits(model, True)
    found["attention held at the end"] = model.held(held_out)
    train(dense, split, steps // 2, "dense", 2)
    found["bits per byte, trained on densely"] = bits(dense, False)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help=f"dense steps of 4 windows of {CONTEXT} bytes")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model")
    options = parser.parse_args()
    print(f"Each query sees {CHOSEN} of at most {CONTEXT} keys.")
    for name, value in main(options.steps, options.layers).items():
        print(f"{value:.3f} {name}")
