"""`bench huggingface`: published weights of a transformers model, dilated, against its own dense attention."""

from __future__ import annotations

import copy
import difflib
import logging
import pathlib
import random
import shutil
import statistics
import textwrap
import unittest
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dilated_attention_lab.bench import activations
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.suites import Step

MODULES = (difflib, logging, pathlib, random, shutil, statistics, textwrap, unittest)
"""The modules whose documentation is the text: many pages of English on every machine with Python."""

TOKENS = 512
PATTERNS = {
    "128-token segments": ((128,), (1,)),
    "128-token segments and every 4th token": ((128, 512), (1, 4)),
    "64-token segments": ((64,), (1,)),
}


def steps(device: torch.device, quick: bool) -> list[Step]:
    return [Step("all-MiniLM-L6-v2", lambda: _rows(device))]


def _rows(device: torch.device) -> Iterator[Row]:
    shape = {"model": "all-MiniLM-L6-v2", "batch": len(MODULES), "seq_len": TOKENS, "heads": 12}
    if why := activations.missing(activations.MINILM):
        yield Row("embeddings", shape, None, "", refused=why)
        return
    from dilated_attention.integrations.huggingface import dilate

    tokenizer, dense = activations.load_minilm(attn_implementation="eager")
    dense.to(device)

    def encoded(lengths: list[int]) -> dict[str, Tensor]:
        rows = [
            tokenizer(documentation(module), truncation=True, max_length=length)["input_ids"]
            for module, length in zip(MODULES, lengths, strict=True)
        ]
        return dict(tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(device))

    ragged = encoded([TOKENS - 60 * i for i in range(len(MODULES))])
    whole = dilate(copy.deepcopy(dense), [TOKENS], [1])
    difference = (embeddings(whole, ragged) - embeddings(dense, ragged)).abs().max().item()
    name = "largest difference of an embedding to eager attention, one segment, padded texts"
    yield Row(name, shape, difference, "", bar=1e-5)
    texts = encoded([TOKENS] * len(MODULES))
    for label, (segment_lengths, dilation_rates) in PATTERNS.items():
        ours = dilate(copy.deepcopy(dense), segment_lengths, dilation_rates)
        cosine = (embeddings(ours, texts) * embeddings(dense, texts)).sum(-1)
        parameters = shape | {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
        for word, value in (("mean", cosine.mean()), ("least", cosine.min())):
            yield Row(f"{label}: cosine to dense, {word}", parameters, value.item(), "")


@torch.no_grad()
def embeddings(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return unit vectors `(texts, width)`: the mean of the last layer over the real tokens, as in training."""
    real = batch["attention_mask"].unsqueeze(-1)
    hidden = model(**batch).last_hidden_state
    return torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def documentation(module: ModuleType) -> str:
    """Return what a module of the standard library says about itself and its public names."""
    public = [getattr(module, name) for name in sorted(vars(module)) if not name.startswith("_")]
    own = [entry for entry in public if str(getattr(entry, "__module__", "")).partition(".")[0] == module.__name__]
    pages = [module, *own, *(method for entry in own if isinstance(entry, type) for method in vars(entry).values())]
    return "\n\n".join(page.__doc__ for page in pages if isinstance(page.__doc__, str))
