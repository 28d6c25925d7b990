"""`bench serving`: batches of an embedding model of random weights, beside sdpa, ONNX Runtime and OpenVINO."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import Contender, contender
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.suites import Step, over
from dilated_attention_lab.bench.suites.own_attention import OURS, choose, modernbert

UNPADDED = "unpadded"
WORDS = 256  # the forward of a larger vocabulary takes no longer
BARS = {(128, False): 0.97, (128, True): 0.95, (512, False): 0.9, (512, True): 0.85, (2048, True): 0.5}
"""The bars of the time over sdpa, by padded length and whether texts are shorter; 1 for others."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Describe a batch of `texts`, all of `seq_len` tokens, or with `padded` of evenly spaced lengths from a
    sixteenth of it to all of it."""

    texts: int
    seq_len: int
    padded: bool

    @property
    def title(self) -> str:
        return f"{self.texts} x {self.seq_len:,}{' padded' if self.padded else ''}"

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return tokens and mask, both `(texts, seq_len)` int64."""
        shortest = self.seq_len // 16 if self.padded else self.seq_len
        lengths = torch.linspace(shortest, self.seq_len, self.texts, device=device).round()
        mask = torch.arange(self.seq_len, device=device) < lengths[:, None]
        return torch.randint(WORDS, mask.shape, device=device), mask.long()


BATCHES = [Batch(x, n, padded) for x, n in ((32, 128), (8, 512), (4, 2048)) for padded in (False, True)]


def steps(device: torch.device, quick: bool) -> list[Step]:
    if quick:
        return [_step(device, "ModernBERT-base", Batch(4, 64, True), torch.float32, layers=3)]
    return [
        _step(device, name, batch, dtype)
        for name in MODELS
        for dtype in (torch.float32, torch.bfloat16)
        for batch in BATCHES
    ]


def _embedding_gemma(layers: int) -> Any:
    """Return a model of EmbeddingGemma's shape, which reads up to 2,048 tokens, with few words."""
    from transformers import Gemma3TextConfig, Gemma3TextModel

    config = Gemma3TextConfig(
        num_hidden_layers=layers, hidden_size=768, intermediate_size=1152, num_attention_heads=3,
        num_key_value_heads=1, head_dim=256, sliding_window=512, use_bidirectional_attention=True, use_cache=False,
        vocab_size=WORDS,
    )  # fmt: skip
    return Gemma3TextModel(config)


def _step(device: torch.device, name: str, batch: Batch, dtype: torch.dtype, layers: int = 6) -> Step:
    """Compare the time of a forward without gradients: this library, `sdpa`, and each runtime that is installed."""

    def run() -> Iterator[Row]:
        inputs = batch.inputs(device)
        model = _model(name, layers).to(device, dtype)
        parameters = {
            "model": name, "texts": batch.texts, "seq_len": batch.seq_len, "padded": batch.padded,
            "dtype": str(dtype).removeprefix("torch."), "heads": model.config.num_attention_heads, "layers": layers,
        }  # fmt: skip
        contenders = {implementation: _forward(model, implementation, inputs) for implementation in (OURS, "sdpa")}
        if batch.padded:
            contenders[UNPADDED] = _unpadded(model, inputs)
        refusals = {runtime: _refusal(runtime, device, dtype) for runtime in RUNTIMES}
        for runtime, why in refusals.items():
            if why is None:
                contenders[runtime] = RUNTIMES[runtime](_onnx(name, layers), dtype, inputs)
        rounds = measure.interleave(contenders, seconds=6, device=device, dtype=dtype)
        bar = BARS.get((batch.seq_len, batch.padded), 1.0)
        yield over(rounds, OURS, "sdpa", "forward", parameters, bar=bar)
        if batch.padded:
            yield over(rounds, UNPADDED, "sdpa", "forward", parameters, "forward, unpadded: time over sdpa", bar=bar)
        for runtime, why in refusals.items():
            if why is None:
                yield over(rounds, OURS, runtime, "forward", parameters, bar=1.0 if batch.seq_len >= 2048 else None)
            else:
                yield Row(f"forward: time over {runtime}", parameters, None, "x", refused=why)

    return Step(f"{name}, {batch.title}, {dtype}", run)


def _model(name: str, layers: int) -> Any:
    torch.manual_seed(0)
    return MODELS[name](layers).eval()


def _forward(model: Any, implementation: str, inputs: tuple[Tensor, Tensor]) -> Contender:
    tokens, mask = inputs

    @torch.no_grad()
    def forward() -> None:
        choose(model, implementation)
        model(input_ids=tokens, attention_mask=mask)

    return contender(forward)


def _unpadded(model: Any, inputs: tuple[Tensor, Tensor]) -> Contender:
    """Return the forward of a copy that packs the real tokens of the batch."""
    from dilated_attention.integrations.huggingface import unpad

    model = copy.deepcopy(model)
    choose(model, OURS)
    return _forward(unpad(model), OURS, inputs)


@cache
def _onnx(name: str, layers: int) -> bytes:
    """Return the model as an ONNX file for any batch, exported with `sdpa`."""
    model = _model(name, layers)
    model.config.return_dict = False
    batch, seq_len = (torch.export.Dim(name, min=1, max=1 << 16) for name in ("batch", "seq_len"))
    shapes = {"input_ids": {0: batch, 1: seq_len}, "attention_mask": {0: batch, 1: seq_len}}
    inputs = dict(zip(shapes, Batch(4, 64, True).inputs(torch.device("cpu")), strict=True))
    program = torch.onnx.export(model, (), kwargs=inputs, dynamic_shapes=shapes, dynamo=True, verbose=False)
    return program.model_proto.SerializeToString()  # type: ignore[union-attr]


def _refusal(runtime: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a runtime does not run, or None if it does."""
    package = runtime.lower().replace(" ", "")
    lacking = [name for name in (package, "onnxscript") if importlib.util.find_spec(name) is None]
    if lacking:
        return f"{' and '.join(lacking)} not installed"
    if device.type != "cpu":
        return "compared on processors"
    if runtime == "ONNX Runtime" and dtype == torch.bfloat16:
        return "it multiplies no bfloat16 on processors"
    return None


def _onnx_runtime(model: bytes, dtype: torch.dtype, inputs: tuple[Tensor, Tensor]) -> Contender:
    import onnxruntime  # type: ignore[import-not-found, unused-ignore]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    named = dict(zip(names, [x.numpy() for x in inputs], strict=True))
    return contender(lambda: session.run(None, named))


def _openvino(model: bytes, dtype: torch.dtype, inputs: tuple[Tensor, Tensor]) -> Contender:
    import openvino  # type: ignore[import-not-found, unused-ignore]

    precision = "bf16" if dtype == torch.bfloat16 else "f32"
    options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model), "CPU", options)
    arrays = [x.numpy() for x in inputs]
    return contender(lambda: compiled(arrays))


RUNTIMES = {"ONNX Runtime": _onnx_runtime, "OpenVINO": _openvino}
MODELS: dict[str, Callable[[int], Any]] = {"ModernBERT-base": modernbert, "EmbeddingGemma": _embedding_gemma}
