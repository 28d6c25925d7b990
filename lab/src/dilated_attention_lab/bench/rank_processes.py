"""Measure with several real processes under torchrun, for the suite `parallel`; rank 0 prints JSON."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.elastic.multiprocessing.errors import record

from dilated_attention import dilated_attention
from dilated_attention.nn import NativeSparseAttention, Rotary
from dilated_attention.parallel import sequence_range, set_context_parallel, shard_sequence
from dilated_attention.plumbing import Link, Traffic, Transfer, link_of, use_link
from dilated_attention_lab.bench.cases import Case
from dilated_attention_lab.bench.measure import in_new_process
from dilated_attention_lab.bench.simulate import RehearsalLink

Samples = dict[str, list[float]]


def measure(mode: str, case: Case, ranks: int, *, rounds: int, limit: Sequence[str] = ()) -> dict[str, Any]:
    """Run `mode` in `ranks` processes of one thread each, and return what it measures.

    Raises RuntimeError if a process fails.

    Args:
        mode: a key of `MODES`. rounds: how often each contender is timed.
        limit: a command to start the processes with, which gives them a slower network (`limited`).
    """
    place = f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1", f"--master-port={_free_port()}"
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}  # elsewhere it has another name
    return in_new_process(
        __name__,
        {"mode": mode, "case": case.parameters, "rounds": rounds},
        limit=limit,
        launcher=("torch.distributed.run", *place, "-m"),
        OMP_NUM_THREADS="1",
        **loopback,
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def limited(megabits: int) -> list[str]:
    """Return a command prefix that runs a command in a new network namespace, over a link of `megabits` Mbit/s."""
    slower = f"tc qdisc add dev lo root tbf rate {megabits}mbit burst 256kb latency 1s"
    script = f'ip link set lo up && {slower} && exec "$@"'
    return ["unshare", "--map-root-user", "--net", "sh", "-c", script, "sh"]


def limit_refusal() -> str | None:
    """Return why this machine cannot run a process over a slow link, as `limited` does, or None if it can."""
    try:
        process = subprocess.run([*limited(100), "true"], capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"no limited link: {error.filename} is not installed"
    return None if process.returncode == 0 else f"no limited link: {process.stderr.strip().splitlines()[-1]}"


def _interleave(contenders: Mapping[str, Callable[[], float | None]], rounds: int) -> Samples:
    """Return every contender's seconds in every round, on the slowest rank. A number that a contender returns replaces
    its measured seconds."""
    names = list(contenders)
    samples: Samples = {name: [] for name in names}
    for i in range(rounds + 1):  # the first is a warm-up
        for j in range(len(names)):
            name = names[(i + j) % len(names)]
            dist.barrier()
            begin = time.perf_counter()
            told = contenders[name]()
            seconds = torch.tensor(time.perf_counter() - begin if told is None else told, dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if i:
                samples[name].append(seconds.item())
    return samples


def _attend(case: Case, inputs: Sequence[Tensor], mesh: ProcessGroup | None, **options: Any) -> Tensor:
    """Return the output of the case's call on q, k and v, the first of `inputs`: with a mesh, this rank's shards."""
    q, k, v, *_ = inputs
    if mesh is not None:
        options |= {"mesh": mesh, "seq_len": case.seq_len}
    out = dilated_attention(q, k, v, case.segment_lengths, case.dilation_rates, is_causal=case.is_causal, **options)
    assert isinstance(out, Tensor)
    return out


def _training_step(case: Case, tensors: Sequence[Tensor], mesh: ProcessGroup | None) -> Callable[[], None]:
    *inputs, gradient = (x.clone() for x in tensors)
    leaves = [x.requires_grad_() for x in inputs]

    def step() -> None:
        torch.autograd.grad(_attend(case, leaves, mesh), leaves, gradient)

    return step


def _tensors(case: Case) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(case.batch, case.seq_len, case.heads, case.head_dim) for _ in range(4)]


def _scaling(case: Case, rounds: int, mesh: ProcessGroup) -> dict[str, Any]:
    """Time a forward and backward of the same sequence on rank 0 alone, on all ranks, and on all ranks with the seconds
    of waiting for others' rows subtracted. Return each one's seconds in every round, by name."""
    tensors = _tensors(case)
    alone = _training_step(case, tensors, None)
    shared = _training_step(case, [shard_sequence(x, mesh) for x in tensors], mesh)
    link = link_of(mesh)

    def compute() -> float:
        """Run the forward and backward on all ranks; return the seconds minus those of waiting for others' rows."""
        link.traffic = Traffic()
        begin = time.perf_counter()
        shared()
        return time.perf_counter() - begin - link.traffic.waited

    return _interleave(
        {"alone": lambda: alone() if dist.get_rank() == 0 else None, "all": shared, "all, waiting apart": compute},
        rounds,
    )


def _single(case: Case, rounds: int, mesh: ProcessGroup) -> dict[str, Any]:
    """Time a forward and backward over a mesh of one rank, and without a mesh. Return each one's seconds in every
    round, and how many `transfers` the mesh has started, which should be none."""
    tensors = _tensors(case)
    samples = _interleave(
        {"mesh": _training_step(case, tensors, mesh), "no mesh": _training_step(case, tensors, None)}, rounds
    )
    return samples | {"transfers": link_of(mesh).traffic.rounds}


class PatientLink(Link):
    """Wait for every transfer where it starts, to measure how much communication other links hide."""

    def started(self, works: list[dist.Work], *arguments: Any) -> Transfer:
        with self.guard("while waiting"):
            for work in works:
                work.wait()
        return super().started(works, *arguments)


def _overlap(case: Case, rounds: int, mesh: ProcessGroup) -> dict[str, Any]:
    """Time a forward with its exchange of rows overlapped, not overlapped, and left out; and the exchange alone.

    Not overlapped: each transfer is waited for where it starts. Return each one's seconds in every round, and the
    `bytes` that the rank sends in one forward.
    """
    shards = [shard_sequence(x, mesh) for x in _tensors(case)]
    links: dict[str, Link] = {"hidden": Link(mesh), "waited for": PatientLink(mesh), "left out": RehearsalLink(mesh)}

    def forward(name: str) -> None:
        use_link(links[name])
        with torch.no_grad():
            _attend(case, shards, mesh, transport="exchange")

    for name in links:
        forward(name)
    sent = links["hidden"].traffic.bytes_sent
    peers, rank = dist.get_world_size(), dist.get_rank()
    splits = [0 if j == rank else sent // (peers - 1) for j in range(peers)]
    send, receive = (torch.zeros(sum(splits), dtype=torch.uint8) for _ in range(2))

    def exchange() -> None:
        dist.all_to_all_single(receive, send, splits, splits)

    contenders = {name: lambda name=name: forward(name) for name in links}
    samples = _interleave({**contenders, "exchange": exchange}, rounds)
    return samples | {"bytes": sent}


def _shares(rounds: int, cores: int, seconds: Callable[[int, bool], float]) -> Samples:
    """Compare the processor time of one rank for all of the work with the times of ranks that share it.

    Return the processor seconds of each round: of one rank `alone`, and the `mean` and the `most` over the ranks that
    share. Waiting does not count, so there may be more ranks than cores. `cores` ranks compute alone at the same time,
    each by itself, since busy cores share the memory's rate; `alone` is their mean.

    seconds: runs the work of a round, alone or shared, and returns this rank's seconds. Round 0 is a warm-up.
    """
    samples: Samples = {"alone": [], "mean": [], "most": []}
    rank = dist.get_rank()
    for i in range(rounds + 1):
        times = torch.zeros(2, dist.get_world_size(), dtype=torch.float64)
        dist.barrier()
        if rank < cores:
            times[0, rank] = seconds(i, True)
        dist.barrier()
        times[1, rank] = seconds(i, False)
        dist.all_reduce(times)
        alone, shares = times
        if i:
            for name, found in (("alone", alone[:cores].mean()), ("mean", shares.mean()), ("most", shares.max())):
                samples[name].append(float(found))
    return samples


def _selecting(case: Case, rounds: int, mesh: ProcessGroup) -> dict[str, Any]:
    """Time a forward and backward of native sparse attention over the same sequence on one rank, and shared by all.

    Return what `_shares` does. Each round has another input, for which other blocks are chosen.
    """
    width = case.heads * case.head_dim
    torch.manual_seed(0)
    whole, shared = (NativeSparseAttention(width, case.heads) for _ in range(2))
    set_context_parallel(shared, mesh, seq_len=case.seq_len)
    tables = Rotary(case.head_dim).tables(torch.arange(case.seq_len))
    own = slice(*sequence_range(case.seq_len, mesh))

    def seconds(round_: int, is_alone: bool) -> float:
        x = torch.randn(case.batch, case.seq_len, width, generator=torch.Generator().manual_seed(round_))
        module, at = (whole, slice(None)) if is_alone else (shared, own)
        begin = time.thread_time()
        out = module(x[:, at], (tables[0][at], tables[1][at]))
        torch.autograd.grad(out, list(module.parameters()), out.detach())
        return time.thread_time() - begin

    return _shares(rounds, min(os.cpu_count() or 1, dist.get_world_size()), seconds)


def _of_gemma_shape() -> Any:
    """Return a model with the widths, heads and windows of Gemma 3 270M, and random weights: 5 layers with windows, and
    one that sees all earlier tokens."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    from dilated_attention.integrations.huggingface import NAME

    config = Gemma3TextConfig(
        num_hidden_layers=6, layer_types=["sliding_attention"] * 5 + ["full_attention"], sliding_window=512,
        hidden_size=640, intermediate_size=2048, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
        vocab_size=512, max_position_embeddings=1 << 17,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config)
    model.set_attn_implementation(NAME)
    return model


def _training(case: Case, rounds: int, mesh: ProcessGroup) -> dict[str, Any]:
    """Time a training step of a transformers model on the same sequence on one rank, while the others wait, and shared
    by all. Return what `_shares` does, and the relative `difference` of the losses.

    Activations are computed anew in the backward: one rank could not hold those of a long sequence.
    """
    from dilated_attention.integrations.huggingface import shard_batch

    model = _of_gemma_shape().train()
    model.gradient_checkpointing_enable()
    losses: dict[bool, float] = {}

    def seconds(round_: int, is_alone: bool) -> float:
        shape = case.batch, case.seq_len if round_ else case.seq_len // 16
        tokens = torch.randint(512, shape, generator=torch.Generator().manual_seed(round_))
        set_context_parallel(model, None if is_alone else mesh)
        batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        if not is_alone:
            batch = shard_batch({"input_ids": tokens, "labels": tokens}, mesh)
        begin = time.thread_time()
        loss = model(**batch).loss
        loss.backward()
        model.zero_grad()
        losses[is_alone] = loss.item()
        return time.thread_time() - begin

    samples = _shares(rounds, 1, seconds)
    return {**samples, "difference": abs(losses[False] - losses.get(True, 0.0)) / abs(losses[False])}


MODES = {
    "scaling": _scaling, "single": _single, "overlap": _overlap, "selecting": _selecting, "training": _training,
}  # fmt: skip


@record  # torchrun then tells a rank's traceback
def _serve(request: dict[str, Any]) -> None:
    """Be one of the processes that `measure` starts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    answer = MODES[request["mode"]](Case(**request["case"]), request["rounds"], dist.group.WORLD)
    if dist.get_rank() == 0:
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
