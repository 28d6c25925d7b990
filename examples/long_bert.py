"""Fine-tune a BERT-like model at four times its length with dilated attention.

Which package of Python's standard library contains a piece of source? A small transformers model learns it from pieces
of 128 bytes with its own dense attention. Then `extend_positions` repeats its table of positions to 512, `dilate` gives
it segments of 128 tokens and a sparse branch over all 512, and some steps at 512 bytes teach it to use what it can now
see.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from dilated_attention.integrations.huggingface import dilate, extend_positions
from dilated_attention_lab.training.text import read_text, standard_library

SHORT, LONG = 128, 512
PACKAGES = ("asyncio", "ctypes", "email", "encodings", "http", "multiprocessing", "unittest", "xml")


class Classifier(nn.Module):
    """Logits of the packages: the mean of BERT's last layer, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=256,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=SHORT,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(config.hidden_size, len(PACKAGES))

    def forward(self, pieces: Tensor) -> Tensor:
        return self.head(self.bert(pieces).last_hidden_state.mean(1))

    def lengthen(self) -> None:
        """Positions for LONG tokens, each the trained one at its place modulo SHORT, and dilated attention."""
        extend_positions(self.bert, LONG)
        dilate(self.bert, segment_lengths=[SHORT, LONG], dilation_rates=[1, 4])


def draw(texts: list[Tensor], size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pieces of source, all packages equally likely, and which package each is of."""
    labels = torch.randint(len(texts), (size,), generator=generator)
    starts = [int(torch.randint(len(texts[label]) - length, (), generator=generator)) for label in labels.tolist()]
    pieces = [texts[label][i : i + length] for label, i in zip(labels.tolist(), starts, strict=True)]
    return torch.stack(pieces).long(), labels


def train(model: Classifier, texts: list[Tensor], steps: int, length: int, rate: float) -> None:
    generator = torch.Generator().manual_seed(length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(steps):
        pieces, labels = draw(texts, 4096 // length, length, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(pieces), labels).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: Classifier, texts: list[Tensor], length: int) -> float:
    pieces, labels = draw(texts, 400, length, torch.Generator().manual_seed(1))
    return (model(pieces).argmax(-1) == labels).float().mean().item()


def main(steps: int = 400) -> dict[str, float]:
    torch.manual_seed(0)
    texts = [read_text([standard_library() / name]).content for name in PACKAGES]
    learn = [text[: len(text) * 4 // 5] for text in texts]
    test = [text[len(text) * 4 // 5 :] for text in texts]
    model = Classifier()
    found = {"untrained": accuracy(model, test, SHORT)}
    train(model, learn, steps, SHORT, 2e-3)
    found["trained, 128 bytes, dense"] = accuracy(model, test, SHORT)
    model.lengthen()
    found["the same at 512 bytes, dilated"] = accuracy(model, test, LONG)
    train(model, learn, max(1, steps // 2), LONG, 1e-3)
    found["fine-tuned at 512 bytes, dilated"] = accuracy(model, test, LONG)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="at 128 bytes; half as many follow at 512")
    for name, value in main(parser.parse_args().steps).items():
        print(f"{value:6.1%} of held-out pieces right, {name}")
