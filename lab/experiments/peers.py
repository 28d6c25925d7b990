"""Other implementations, from checkouts that you have, beside the variants of `compare` that mean the same.

    python lab/experiments/peers.py fork=PATH torchscale=PATH [--quick] [--only TEXT] [--out FOLDER]

measures the settings of `dilated-attention compare`, each peer in the same rounds as dense attention and our variant,
and writes rows to <out>/<device>/compare.jsonl, which `plot` makes tables of. It is not installed.

A peer is run as it is. Where torchscale needs flash-attn, and that is not there, PyTorch's fused attention stands in
for that one call, and its row says so.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from dilated_attention import torch_internals
from dilated_attention_lab.bench import compare, measure
from dilated_attention_lab.bench.cases import Case, Method, trained
from dilated_attention_lab.bench.compare import Call, Setting
from dilated_attention_lab.bench.results import Recorder, Row


@dataclass(frozen=True, slots=True)
class Peer:
    """One class of another implementation.

    Attributes:
        name: in the table. method: the variant of ours that is meant to compute the same.
        make: from a case to the call. stands_in: what was put in the place of a package that is not installed.
        offsets: where the peer's differ from ours, which then take them.
        same_pattern: whether it sees the keys of that variant; else it has no error against them.
    """

    name: str
    method: Method
    make: Callable[[Case], Call]
    stands_in: str = ""
    offsets: str = "head"
    same_pattern: bool = True


Loaded = tuple[list[Peer], list[str]]
"""The classes of a folder, and why others of it were not loaded."""


def load(argument: str) -> list[Peer]:
    """The peers behind one `NAME=PATH`."""
    name, equals, path = argument.partition("=")
    if name not in ADAPTERS or not equals:
        raise ValueError(f"{argument}: give NAME=PATH, NAME one of {', '.join(ADAPTERS)}")
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{argument}: {path or 'an empty path'} is not a folder")
    try:
        with patch.object(sys, "path", [str(folder.resolve()), *sys.path]):
            found, reasons = ADAPTERS[name](folder.resolve())
    except Exception as error:  # of other people's code
        raise ValueError(f"{argument}: cannot be loaded from {path}: {reason(error)}") from error
    if reasons:
        print(f"{argument}: not loaded: {'; '.join(reasons)}", file=sys.stderr)
    return found


def reason(error: Exception) -> str:
    """An error of other people's code, in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def _imported(name: str, folder: Path) -> Any:
    """The module, of this folder: another one of its name may be imported already."""
    module = importlib.import_module(name)
    place = Path(module.__file__ or next(iter(module.__path__)))
    if not place.is_relative_to(folder / name.partition(".")[0]):
        raise ImportError(f"{name} is imported from {place} already; give one peer of that package at a time")
    return module


FORK: dict[str, Method] = {
    "dilated_attention.DilatedAttention": "head groups",
    "improved_dilated_attention.ImprovedDilatedAttention": "head groups",
    "ring_dilated_attention.RingDilatedAttention": "head groups",
    "block_sparse_ring_dilated_attention.BlockSparseRingDilatedAttention": "block-sparse",
}
"""Classes of the reported fork, and what each is meant to compute."""


def _fork(folder: Path) -> Loaded:
    _imported("dilated_attention_pytorch", folder)
    found, reasons = [], []
    for path, method in FORK.items():
        module, _, name = path.partition(".")
        try:
            kind = getattr(_imported(f"dilated_attention_pytorch.{module}", folder), name)
        except Exception as error:  # of other people's code
            reasons.append(f"{name}: {reason(error)}")
            continue
        make = _fork_sparse if method == "block-sparse" else _module
        found.append(Peer(f"fork: {name}", method, partial(make, kind=kind), same_pattern=make is _module))
    if not found:
        raise ImportError("; ".join(reasons))
    return found, reasons


def _module(case: Case, kind: Any) -> Call:
    module = kind(list(case.segment_lengths), list(case.dilation_rates)).eval()
    return lambda q, k, v: module(q, k, v, is_causal=case.is_causal)


def _fork_sparse(case: Case, kind: Any) -> Call:
    """Return a call of the fork with its own sparse pattern at the case's density.

    The pattern differs from the case's, so no error is reported.
    """
    config = importlib.import_module(kind.__module__).SparsePatternConfig
    sparse = config(pattern_type="dilated_sparse", sparsity_ratio=case.density, block_size=case.block_size)
    module = kind(list(case.segment_lengths), list(case.dilation_rates), sparse_config=sparse).eval()
    return lambda q, k, v: module(q, k, v, is_causal=case.is_causal)


def _torchscale(folder: Path) -> Loaded:
    kind = _imported("torchscale.component.dilated_attention", folder).DilatedAttention
    base = _imported("torchscale.component.multihead_attention", folder)
    missing = ""
    if base.flash_attn_func is None:  # without a GPU
        base.flash_attn_func, missing = _flash, "without flash-attn: its call is PyTorch's fused attention"

    def make(case: Case) -> Call:
        """Its attention without its projections, as ours: each is replaced by the identity."""
        arguments = SimpleNamespace(
            segment_length=list(case.segment_lengths), dilated_ratio=list(case.dilation_rates), flash_attention=True,
            multiway=False, xpos_rel_pos=False, layernorm_eps=1e-5, seq_parallel=False, xpos_scale_base=512,
        )  # fmt: skip
        module = kind(arguments, case.heads * case.head_dim, case.heads, self_attention=True).eval()
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(module, name, nn.Identity())
        module.inner_attn_ln = None

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, _ = module(q.flatten(2), k.flatten(2), v.flatten(2), is_causal=case.is_causal)
            return out.unflatten(2, (case.heads, case.head_dim))

        return call

    return [Peer("torchscale", "dilated", make, missing, "head_block")], []


ADAPTERS: dict[str, Callable[[Path], Loaded]] = {"torchscale": _torchscale, "fork": _fork}


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, bias: object, scale: float | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """(batch, tokens, heads, head_dim), as flash-attn takes them; out and lse."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch_internals.flash_for_cpu(q, k, v, dropout, is_causal, scale=scale)
    return out.transpose(1, 2), lse


def checks(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Mapping[str, float]:
    """Least and greatest sum of a row's weights, read from values that are all 1; 1 where a row depends on other tokens
    than its own, 0 where it attends over heads or not at all."""
    sums = call(q, k, torch.ones_like(v))
    if sums.shape != v.shape:
        raise ValueError(f"it returns {tuple(sums.shape)} for values of {tuple(v.shape)}")
    kept = sums[sums != 0]
    half = q.shape[1] // 2
    other = v.clone()
    other[:, half] += 1.0
    changed = (call(q, k, v) != call(q, k, other)).flatten(2).any(-1)[0]
    changed[half] = False
    least, greatest = (float(kept.min()), float(kept.max())) if kept.numel() else (0.0, 0.0)
    return {"row sum, least": least, "row sum, greatest": greatest, "depends on other tokens": float(changed.any())}


# ---- measuring


def measured(setting: Setting, device: torch.device, found: Sequence[Peer]) -> Iterator[Row]:
    """A row a peer, and our time over it: its error is against what our variant is to compute."""
    variants = compare.variants(setting.base)
    ours = {peer.name: next(name for name, case in variants.items() if _meant(peer, case)) for peer in found}
    calls: dict[str, Call] = {name: variants[name].prepare(device) for name in dict.fromkeys(["dense", *ours.values()])}
    backward, figures, described = dict.fromkeys(calls, setting.backward), {}, {}
    for peer in found:
        case = replace(variants[ours[peer.name]], offsets=peer.offsets)  # type: ignore[arg-type]
        its = compare.parameters(setting, peer.name, case)
        if not peer.same_pattern:
            its = {key: value for key, value in its.items() if key not in ("blocks", "density")}
        described[peer.name] = its | ({"stands in": peer.stands_in} if peer.stands_in else {})
        inputs = compare.inputs_of(setting.base, device)
        try:
            call = peer.make(case)
            known = case if peer.same_pattern else None
            figures[peer.name] = {**checks(call, *inputs), **compare.error_and_peak(setting, known, call, device)}
        except Exception as error:  # of other people's code
            refused = f"it does not run: {reason(error)}"
            yield Row(compare.NAME, described[peer.name], None, "ms", refused=refused)
            continue
        calls[peer.name] = call
        backward[peer.name] = setting.backward and _differentiable(call, inputs)
    contenders = {
        name: trained(call, compare.inputs_of(setting.base, device), backward=backward[name])
        for name, call in calls.items()
    }
    rounds = measure.interleave(contenders, seconds=setting.seconds, device=device, least=2)
    for name in figures:
        phases = setting.phases[: 1 + backward[name]]
        yield Row.of(
            compare.NAME, described[name], rounds.spread(name).scaled(1e3), "ms", figures=figures[name],
            over={"dense": rounds.ratio(name, "dense")}, times={phase: rounds.spread(name, phase) for phase in phases},
        )  # fmt: skip
        for phase in phases:
            its = compare.parameters(setting, ours[name], variants[ours[name]])
            yield Row.of(f"{phase}: time over {name}", its, rounds.ratio(ours[name], name, phase), bar=1.0)


def _meant(peer: Peer, case: Case) -> bool:
    """Whether the peer is meant to compute this variant of ours."""
    return case.method == peer.method and case.density in (None, 0.10)


def _differentiable(call: Call, inputs: Sequence[Tensor]) -> bool:
    leaves = [x.clone().requires_grad_() for x in inputs]
    try:
        for _ in range(2):  # the first may leave a part of its graph to the second
            torch.autograd.grad(call(*leaves).sum(), leaves)
    except Exception:  # of other people's code
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("peer", nargs="+", metavar="NAME=PATH", help=f"NAME one of {', '.join(ADAPTERS)}")
    parser.add_argument("--quick", action="store_true", help="2,048 and 4,096 tokens")
    parser.add_argument("--only", default="", metavar="TEXT", help="the settings whose title holds it")
    parser.add_argument("--out", type=Path, default=Path("runs/results"), help="folder of the rows")
    options = parser.parse_args()
    found, device = [peer for argument in options.peer for peer in load(argument)], torch.device("cpu")
    recorder = Recorder(options.out, "compare", device)
    for setting in compare.settings(options.quick):
        if options.only in setting.label and not setting.compiled:
            print(setting.label, flush=True)
            for row in measured(setting, device, found):
                recorder.add(row)
                print(
                    f"  {row.name}, {row.parameters['variant']}: {row.value} {row.unit}{row.refused or ''}", flush=True
                )


if __name__ == "__main__":
    main()
