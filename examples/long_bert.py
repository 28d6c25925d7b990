"""Fine-tune a BERT-like model at four times its length with dilated attention.

A small masked language model of bytes is trained at 128 tokens with its own dense attention. Then its table of
positions is repeated to 512, `dilate` gives it segments of 128 tokens and a sparse branch over all 512, and a few steps
more teach it to use what is new. Text: the Python standard library.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from dilated_attention.integrations.huggingface import dilate
from dilated_attention.training.text import read_text

SHORT, LONG = 128, 512
MASK, VOCABULARY = 256, 257  # one token more than there are bytes


def batch(text: Tensor, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Bytes of which 15 % are masked, and the labels: -100 where nothing is asked."""
    starts = torch.randint(len(text) - length, (size, 1), generator=generator)
    labels = text[starts + torch.arange(length)].long()
    asked = torch.rand(labels.shape, generator=generator) < 0.15
    return labels.masked_fill(asked, MASK), labels.masked_fill(~asked, -100)


def train(
    model: BertForMaskedLM, text: Tensor, steps: int, length: int, rate: float, generator: torch.Generator
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(steps):
        inputs, labels = batch(text, 4096 // length, length, generator)
        optimizer.zero_grad()
        model(inputs, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def loss(model: BertForMaskedLM, text: Tensor, length: int) -> float:
    """Nats a masked byte, on the same held-out bytes whatever the length."""
    inputs, labels = batch(text, 16, LONG, torch.Generator().manual_seed(1))
    return model(inputs.view(-1, length), labels=labels.view(-1, length)).loss.item()


def main(steps: int = 300) -> dict[str, float]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    text = read_text([]).content
    learn, test = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=SHORT,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=None,
        )
    )
    losses = {"untrained": loss(model, test, SHORT)}
    train(model, learn, steps, SHORT, 2e-3, generator)
    losses["trained at 128 tokens"] = loss(model, test, SHORT)

    embeddings = model.bert.embeddings
    embeddings.position_embeddings.weight = torch.nn.Parameter(
        embeddings.position_embeddings.weight.detach().repeat(LONG // SHORT, 1)
    )
    embeddings.position_ids = torch.arange(LONG)[None]
    embeddings.token_type_ids = torch.zeros(1, LONG, dtype=torch.int64)
    model.config.max_position_embeddings = LONG
    dilate(model, segment_lengths=[SHORT, LONG], dilation_rates=[1, 4])

    losses["dilated, 512 tokens"] = loss(model, test, LONG)
    train(model, learn, max(1, steps // 3), LONG, 5e-4, generator)
    losses["fine-tuned at 512 tokens"] = loss(model, test, LONG)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="at 128 tokens; a third as many follow at 512")
    for name, value in main(parser.parse_args().steps).items():
        print(f"{value:.3f} nats a masked byte, {name}")
