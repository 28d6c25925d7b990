"""Write text with a trained byte-level model, character by character."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any

import torch

from dilated_attention.models import LongNetLM
from dilated_attention_lab.training.text import readable


def write(model: LongNetLM, prompt: bytes, length: int, *, seed: int = 0, **options: Any) -> Iterator[str]:
    """Return an iterator over `length` sampled bytes after `prompt`, as readable text, one character at a time.

    The prompt is read, and wrong arguments raise ValueError, in this call, before the iterator is used. options:
    temperature, top_k and top_p, as in `dilated_attention.models.sample`.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([list(prompt)], dtype=torch.int64, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    drawn = model.stream(tokens, length, generator=generator, **options)

    def pieces() -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in drawn:
            if text := decoder.decode(bytes(token.tolist())):
                yield readable(text)
        if text := decoder.decode(b"", final=True):
            yield readable(text)

    return pieces()
