"""Provide a language model of bytes that learns real text in minutes, and its training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dilated_attention.models import IndexedKeys, LongNetConfig, LongNetLM
from dilated_attention_lab.training.text import Split

SHORT = 512
"""Bytes of a short piece of text."""


class ByteLM(LongNetLM):
    """Give a byte-level `LongNetLM` embeddings of the n-grams at each byte, which a small model then need not compute.

    Hashed embeddings of n-grams (Pagnoni et al. 2024, arXiv:2412.09871, section 3.2) are added to a byte's embedding:
    in one half of its channels those of the n-grams that end there, in the other half those that end one byte before.
    Initially, the first layer compares a query's first half with the keys' second: it looks at what followed the same
    bytes earlier (induction heads, Olsson et al. 2022, arXiv:2209.11895). All of it is trained.

    Args:
        sizes: bytes in each kind of n-gram. rows: rows in the table of each kind.
        sharpness: initial logit of a perfect match in the first layer's comparison.
    """

    def __init__(
        self, config: LongNetConfig, sizes: Sequence[int] = (2, 3, 4), rows: int = 1 << 16, sharpness: float = 12.0
    ) -> None:
        super().__init__(config)
        self.sizes, half = tuple(sizes), config.embed_dim // 2
        self.tables = nn.ModuleList(nn.Embedding(rows, half, sparse=True) for _ in sizes)
        for table in self.tables:
            assert isinstance(table, nn.Embedding)
            nn.init.normal_(table.weight, std=0.25)
        module = "attention.selected" if config.selection else "attention"
        weight = self.get_parameter(f"blocks.0.{module}.input.weight")  # queries; keys and values of each branch
        # |W x|^2 / sqrt(head_dim) = sharpness for x of unit variance, which the norm before attention makes
        compare = torch.randn(config.embed_dim, half) * sharpness**0.5 * config.head_dim**-0.25 * half**-0.5
        nothing = torch.zeros_like(compare)
        with torch.no_grad():
            queries, *pairs = weight.split(config.embed_dim)
            queries.copy_(torch.cat((compare, nothing), 1))
            for keys in pairs[::2]:
                keys.copy_(torch.cat((nothing, compare), 1))

    def embed(self, inputs: Tensor) -> Float[Tensor, "batch seq embed_dim"]:
        ends = [
            table(_hashed(inputs, size, table.num_embeddings))  # type: ignore[arg-type]
            for size, table in zip(self.sizes, self.tables, strict=True)
        ]
        here = torch.stack(ends).sum(0)
        return super().embed(inputs) + torch.cat((here, F.pad(here, (0, 0, 1, -1))), -1)


def _hashed(tokens: Int[Tensor, "batch seq"], size: int, rows: int) -> Int[Tensor, "batch seq"]:
    """Return, for each token, a row in [0, rows) of a table: a hash of the `size` bytes that end there, or of all bytes
    so far if these are fewer."""
    mixed = torch.zeros_like(tokens)
    for back in range(size):
        mixed[:, back:] = mixed[:, back:] + (tokens[:, : tokens.shape[1] - back] + 1) * 257**back
    return mixed * 0x9E3779B1 % 2147483647 % rows


def learn(
    model: ByteLM, split: Split, generator: torch.Generator, progress: Callable[[int], float]
) -> Iterator[tuple[Int[Tensor, "count bytes"], float]]:
    """Train, and yield the bytes that each step read and its loss in nats per byte. Indexers learn from their own loss.

    A third of the training goes to short pieces of text, several per step, the rest to whole windows.

    Args:
        progress: maps the number of steps to the fraction of the training done; it ends after the step that reaches 1.
    """
    device = next(model.parameters()).device
    dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(dense, betas=(0.9, 0.95), weight_decay=0.0),
        torch.optim.SparseAdam(list(model.tables.parameters()), betas=(0.9, 0.95)),
    ]
    step, done = 0, 0.0
    while done < 1:
        windows = split.batch(8, generator)[:, : SHORT + 1] if done < 1 / 3 else split.batch(1, generator)
        if isinstance(model.config.selection, IndexedKeys):
            loss, index_loss = model.losses(windows.to(device))
            (loss + index_loss).backward()
        else:
            loss = model.loss(windows.to(device))
            loss.backward()
        nn.utils.clip_grad_norm_(dense, 1.0)
        step += 1
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 6e-3 * min(1.0, step / 30) * (1 - 0.9 * done)
            optimizer.step()
            optimizer.zero_grad()
        done = progress(step)
        yield windows, loss.item()
