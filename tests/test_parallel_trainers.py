"""Trainers over 2 groups of 2 processes that share their sequences: the losses and weights of one process."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

import processes
from dilated_attention import UnsupportedError
from dilated_attention.integrations.context_parallel import ContextParallel, _require_own_masks
from dilated_attention.integrations.huggingface import NAME
from tolerances import relative_error
from transformers_families import build

pytest.importorskip("accelerate")

SAMPLES, STEPS = 16, 20
ALONE = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
IN_GROUPS = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}


def _samples(are_padded: bool = True) -> list[dict[str, Tensor]]:
    """Return texts, of several lengths and padded, or of one length."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(SAMPLES):
        tokens = torch.randint(3, 97, (29,), generator=generator)
        mask = torch.ones(29, dtype=torch.long)
        if are_padded:
            mask[29 - i :] = 0
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask.bool(), -100)})
    return found


def _in_order(trainer: type) -> type:
    return type("InOrder", (trainer,), {"_get_train_sampler": lambda self, *_: SequentialSampler(self.train_dataset)})


def _environment() -> None:
    """Set what torchrun sets."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _answers(trainer: Any, folder: str) -> dict[str, Any]:
    trainer.train()
    history = trainer.state.log_history
    evaluated = trainer.evaluate()
    trainer.save_model(folder)
    return {
        "losses": np.array([entry["loss"] for entry in history if "loss" in entry]),
        "norms": np.array([float(entry["grad_norm"]) for entry in history if "grad_norm" in entry]),
        "eval_loss": np.array(evaluated["eval_loss"]),
        "predicted": np.array(evaluated.get("eval_sum", 0.0)),
        "weights": np.concatenate([x.detach().flatten().numpy() for x in trainer.model.parameters()]),
    }


def _sum(predictions: Any) -> dict[str, float]:
    logits = torch.as_tensor(predictions.predictions)
    weights = torch.as_tensor(predictions.label_ids)[..., None].clamp(min=0)
    return {"sum": float((logits * weights).mean())}


def trained(folder: str, sizes: dict[str, int], context_size: int | None) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    _environment()
    options = {
        "max_steps": STEPS, "gradient_accumulation_steps": 2, "learning_rate": 0.05, "optim": "sgd", "logging_steps": 1,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "gradient_checkpointing": True,
        "lr_scheduler_type": "constant", "disable_tqdm": True,
    }  # fmt: skip
    arguments = TrainingArguments(f"{folder}/run", **options, **sizes)
    given = {"train_dataset": _samples(), "eval_dataset": _samples(False)[:8], "compute_metrics": _sum}
    model = build("gemma3", NAME)
    if context_size is None:
        trainer = _in_order(Trainer)(model, arguments, **given)
    else:
        trainer = _in_order(type("Long", (ContextParallel, Trainer), {}))(
            model, arguments, context_size=context_size, **given
        )
    return _answers(trainer, f"{folder}/saved")


def _compare(alone: dict[str, Any], together: list[dict[str, Any]], names: list[str]) -> None:
    assert len(alone["losses"]) == STEPS
    assert alone["losses"][-1] < alone["losses"][0]
    for answers in together:
        for name in names:
            np.testing.assert_allclose(answers[name], alone[name], rtol=1e-4, atol=1e-4)
        weights = (torch.from_numpy(x["weights"]) for x in (answers, alone))
        assert relative_error(*weights) <= 1e-5


def test_trainer(tmp_path):
    """Padded batches, gradients summed over two of them, checkpointing, evaluation with predictions, and saving."""
    (alone,) = processes.run(1, trained, str(tmp_path / "alone"), ALONE, None)
    together = processes.run(4, trained, str(tmp_path / "together"), IN_GROUPS, 2)
    _compare(alone, together, ["losses", "norms", "eval_loss", "predicted"])
    files = [{x.name for x in (tmp_path / name / "saved").iterdir()} for name in ("alone", "together")]
    assert files[0] == files[1]


def refused(folder: str) -> None:
    """Give trainers what they refuse."""
    from accelerate import ParallelismConfig

    warnings.simplefilter("ignore")
    _environment()
    kind = type("Long", (ContextParallel, Trainer), {})
    options = {"report_to": [], "use_cpu": True}
    cases = {
        "set the model's own loss": {"label_smoothing_factor": 0.1},
        "average_tokens_across_devices must be True": {"average_tokens_across_devices": False},
    }
    for words, changes in cases.items():
        with pytest.raises(ValueError, match=words):
            kind(build("mistral", NAME), TrainingArguments(folder, **options, **changes), context_size=2)
    for size in (3, 4):
        with pytest.raises(ValueError, match=rf"context_size={size} does not divide the 2 ranks; start it by torchrun"):
            kind(build("mistral", NAME), TrainingArguments(folder, **options), context_size=size)
    config = ParallelismConfig(cp_size=2)
    with pytest.raises(UnsupportedError, match=r"ParallelismConfig\(cp_size=2\): .*give the trainer context_size=2"):
        _require_own_masks(SimpleNamespace(parallelism_config=config, distributed_type="MULTI_CPU"))
    with pytest.raises(UnsupportedError, match="Trainer with DeepSpeed over a mesh is not supported"):
        _require_own_masks(SimpleNamespace(parallelism_config=None, distributed_type="DEEPSPEED"))
    dist.barrier()  # the other rank may still make its groups, in a store of this process


def test_refusals(tmp_path):
    processes.run(2, refused, str(tmp_path))


def tuned(folder: str, sizes: dict[str, int], context_size: int | None, more: dict[str, Any]) -> dict[str, Any]:
    """Train by TRL, whose loss is made of per-token losses that it sums itself."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    warnings.simplefilter("ignore")
    _environment()
    generator = torch.Generator().manual_seed(0)
    lengths = [8 + 8 * (i % 2) for i in range(SAMPLES)]  # 8 packs of 24
    texts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]
    rows = Dataset.from_list([{"input_ids": text, "labels": text} for text in texts])
    options = {
        "max_steps": STEPS, "learning_rate": 0.05, "optim": "sgd", "logging_steps": 1, "report_to": [], "bf16": False,
        "save_strategy": "no", "use_cpu": True, "lr_scheduler_type": "constant", "disable_tqdm": True,
        "gradient_checkpointing": False,
    }  # fmt: skip
    arguments = trl.SFTConfig(f"{folder}/run", **{"max_length": 24, **options, **sizes, **more})
    given = {"train_dataset": rows, "eval_dataset": rows, "processing_class": _tokenizer()}
    if not more:
        targets = ["q_proj", "v_proj"]
        given["peft_config"] = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, init_lora_weights=False)
    torch.manual_seed(0)
    model = build("gemma3", NAME)
    if context_size is None:
        trainer = _in_order(trl.SFTTrainer)(model, arguments, **given)
    else:
        kind = type("Long", (ContextParallel, trl.SFTTrainer), {})
        trainer = _in_order(kind)(model, arguments, context_size=context_size, **given)
    return _answers(trainer, f"{folder}/saved")


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return one whose tokens are "3" to "96", apart by spaces."""
    import tokenizers

    words = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2} | {str(i): i for i in range(3, 97)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")


@pytest.mark.parametrize("more", [{}, {"packing": True}, {"padding_free": True, "max_length": None}], ids=str)
def test_sft_trainer(more, tmp_path):
    """Padded batches with adapters, packed samples, and samples one after another without padding."""
    for name in ("trl", "peft", "datasets"):
        pytest.importorskip(name)
    (alone,) = processes.run(1, tuned, str(tmp_path / "alone"), ALONE, None, more)
    together = processes.run(4, tuned, str(tmp_path / "together"), IN_GROUPS, 2, more)
    _compare(alone, together, ["losses", "norms", "eval_loss"])
