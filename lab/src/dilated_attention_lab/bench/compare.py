"""Measure each variant in docs/requirements.md ("the reports") in the same rounds: time, memory, error against float64,
keys, score entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import SPARSE, Case, Method, trained
from dilated_attention_lab.bench.exact import exact, keys_reached, rows_of
from dilated_attention_lab.bench.results import Record, Row
from dilated_attention_lab.verification import BARS

REPORTED = Case(method="dilated", seq_len=4096, segment_lengths=(1024, 2048, 4096), dilation_rates=(1, 2, 4))
PLAIN = {"dtype": "float32", "batch": 1, "compiled": False, "branches": [*REPORTED.segment_lengths]}
"""Parameters of the rows that charts and pages show in full."""
LONG = replace(REPORTED, segment_lengths=(2048, 4096, 8192))
LENGTHS = (2048, 4096, 8192, 16384, 32768, 262144)
DENSITIES = (0.02, 0.05, 0.10, 0.25, 0.50)
INSIDE = 0.10
"""Density of the blocks inside branches."""
DTYPES = ("float32", "bfloat16", "float16")
ROWS = 24
MOST_FLOPS = 2.5e12
"""The most floating-point operations of a call: some 25 seconds on two cores."""
PLAN = {0.10: 0.67, 0.05: 0.50, 0.02: 0.40}
"""The bars of "The plan" in docs/requirements.md for block-sparse attention at 4,096 tokens: the largest ratio of its
time to a dilated variant's (BASELINES), by density."""
PAIR = "ring of one process", "LongNet branches"
"""Two variants: the first does the same work as the second, and some checks."""
PLANNED = {f"{blocks} blocks, {density:.0%}": bar for blocks in ("local", "random") for density, bar in PLAN.items()}
BASELINES = "LongNet branches", "head groups"
NAME, WORST, RING = "compare", "largest error of a variant", "ring of one process: time over dilated_attention"
PLAN_OVER = "the plan: time over"


@dataclass(frozen=True, slots=True)
class Setting:
    """Hold what the variants of one set of rounds have in common.

    Attributes:
        base: the shape, the dtype, and the branches of those variants that have some.
        backward: whether forward+backward is timed too. compiled: whether the calls are compiled.
        seconds: about how long the rounds take.
    """

    base: Case
    backward: bool = True
    compiled: bool = False
    seconds: float = 10.0

    @property
    def phases(self) -> tuple[str, ...]:
        return ("forward", "forward+backward")[: 1 + self.backward]

    @property
    def plain(self) -> bool:
        """Return whether this is float32, batch 1 and not compiled. Only then is the peak memory measured."""
        return self.base.dtype == "float32" and self.base.batch == 1 and not self.compiled

    @property
    def has_plan(self) -> bool:
        """Return whether the bars that the project's plan sets (PLAN) apply: `base` is the case REPORTED, 4,096 tokens
        in float32 and three branches, and the calls are not compiled."""
        return self.base == REPORTED and not self.compiled

    @property
    def label(self) -> str:
        base = self.base
        words = [f"{base.seq_len:,} tokens", base.dtype, f"batch {base.batch}"]
        words += [f"segments from {base.segment_lengths[0]:,}"] + ["compiled"] * self.compiled
        return ", ".join(words)


def settings(quick: bool) -> list[Setting]:
    if quick:
        first = replace(REPORTED, seq_len=2048)
        others = [replace(first, dtype="bfloat16"), replace(first, dtype="float16"), replace(first, batch=4)]
        return [Setting(first, seconds=3.0), Setting(REPORTED), *(Setting(case, seconds=3.0) for case in others)]
    found = []
    for branches, dtype, lengths in (
        *((REPORTED, dtype, LENGTHS) for dtype in DTYPES),
        (LONG, "float32", LENGTHS),
        *((LONG, dtype, (8192,)) for dtype in DTYPES[1:]),
    ):
        main = branches is REPORTED and dtype == "float32"
        for seq_len in lengths:
            base = replace(branches, dtype=dtype, seq_len=seq_len)
            found.append(Setting(base, seq_len <= (16384 if main else 8192), seconds=40.0 if main else 20.0))
    found += [Setting(replace(REPORTED, seq_len=seq_len, batch=4), seconds=30.0) for seq_len in (2048, 4096, 8192)]
    return [*found, Setting(REPORTED, backward=False, compiled=True, seconds=30.0)]


def variants(base: Case) -> dict[str, Case]:
    """Return the variants of `base`, a case for each name that the table shows."""

    def of(method: Method, **more: Any) -> Case:
        return replace(base, method=method, **more)

    found = {
        "dense": of("dense"),
        "LongNet branches": of("dilated"),
        "head groups": of("head groups"),
        "ring of one process": of("ring"),
    }
    for density in DENSITIES:
        block_size = 64 if density <= 0.05 else 128  # a row sees at least one block
        for blocks in ("local", "random"):
            sparse = of("block-sparse", blocks=blocks, density=density, block_size=block_size)
            found[f"{blocks} blocks, {density:.0%}"] = sparse
    inside: dict[str, Any] = {"density": INSIDE, "block_size": 64}
    for blocks in ("local", "random"):
        product = of("block-sparse dilated", blocks=blocks, **inside)
        found[f"{blocks} blocks inside branches, {INSIDE:.0%}"] = product
    found["multihead module"] = of("multihead")
    found["block-sparse multihead module"] = of("multihead block-sparse", blocks="local", **inside)
    return found


def parameters(setting: Setting, variant: str, case: Case) -> dict[str, Any]:
    branches = list(setting.base.segment_lengths)
    return {**case.parameters, "variant": variant, "branches": branches, "compiled": setting.compiled}


Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def measured(setting: Setting, device: torch.device) -> Iterator[Row]:
    """Yield one row per variant, and rows with bars.

    The rows with bars are: one with the largest error of all variants, before the rows of the variants that were run;
    if `setting.has_plan`, the time of each variant in PLANNED over each one's in BASELINES; and for each phase, the
    time of the ring module in one process over `dilated_attention`'s (PAIR).
    """
    cases = variants(setting.base)
    calls: dict[str, Call] = {}
    for name, case in cases.items():
        if refused := _refusal(case):
            yield Row(NAME, parameters(setting, name, case), None, "ms", refused=refused)
        else:
            call = case.prepare(device)
            calls[name] = torch.compile(call, fullgraph=True) if setting.compiled else call
    figures = {name: _figures(setting, cases[name], call, device) for name, call in calls.items()}
    where = setting.base.parameters | {"compiled": setting.compiled}
    errors, bar = {name: found["error"] for name, found in figures.items()}, BARS[getattr(torch, setting.base.dtype)]
    yield Row(WORST, where, measure.largest(errors.values()), "", bar=bar, figures=errors)
    contenders = {
        name: trained(call, inputs_of(setting.base, device), backward=setting.backward) for name, call in calls.items()
    }
    rounds = measure.interleave(contenders, seconds=setting.seconds, device=device, least=2)
    for name in calls:
        yield Row.of(
            NAME,
            parameters(setting, name, cases[name]),
            rounds.spread(name).scaled(1e3),
            "ms",
            over={"dense": rounds.ratio(name, "dense")} if "dense" in calls and name != "dense" else {},
            times={phase: rounds.spread(name, phase) for phase in setting.phases},
            figures=figures[name],
        )
    if setting.has_plan:
        for baseline, (name, most) in product(BASELINES, PLANNED.items()):
            shares = [figures[x]["share of score entries"] for x in (name, baseline)]
            its = parameters(setting, name, cases[name])
            work = {"score entries over the baseline's": shares[0] / shares[1]}
            yield Row.of(f"{PLAN_OVER} {baseline}", its, rounds.ratio(name, baseline), bar=most, figures=work)
    pair = {name: contenders[name] for name in PAIR}  # alone: among all, long calls leave them two rounds
    alone = measure.interleave(pair, seconds=setting.seconds / 4, device=device, least=5)
    for phase in setting.phases:
        yield Row.of(f"{phase}: {RING}", where, alone.ratio(*PAIR, phase), bar=1.02)


def _refusal(case: Case) -> str | None:
    if case.flops > MOST_FLOPS:
        return f"{case.flops / 1e12:.3g} TFLOP a call; at most {MOST_FLOPS / 1e12:.3g} are run"
    few = min(group.queries.count for group in case.plan.groups) < case.block_size
    return "a branch has fewer keys than a block" if few and case.segment_lengths and case.method in SPARSE else None


def _figures(setting: Setting, case: Case, call: Call, device: torch.device) -> dict[str, float]:
    """Return what `error_and_peak` does, the score entries divided by those of dense attention, and the mean number of
    different keys that a token sees in all heads together."""
    return error_and_peak(setting, case, call, device) | {
        "share of score entries": case.attention_flops / replace(case, method="dense").flops,
        "keys reached": keys_reached(case, rows_of(setting.base, ROWS)),
    }


def rows_at(rows: Sequence[Record], setting: Setting) -> list[Record]:
    """Return those rows of a file that hold the figures of a variant measured in `setting`."""
    return [row for row in _of(setting, rows) if row["name"] == NAME]


def held(rows: Sequence[Record], setting: Setting) -> bool:
    """Return whether the rows of a file include all that the setting measures: an interruption leaves some out."""
    wanted: set[tuple[str, str | None]] = {(WORST, None)}
    wanted |= {(NAME, name) for name in variants(setting.base)}
    wanted |= {(f"{phase}: {RING}", None) for phase in setting.phases}
    if setting.has_plan:
        wanted |= {(f"{PLAN_OVER} {baseline}", name) for baseline in BASELINES for name in PLANNED}
    return wanted <= {(row["name"], row["parameters"].get("variant")) for row in _of(setting, rows)}


def _of(setting: Setting, rows: Sequence[Record]) -> Iterator[Record]:
    """Yield the rows of one setting, among the rows of a file.

    Rows of a variant hold the setting's segment lengths as `branches`, other rows as `segment_lengths`.
    """
    shared = parameters(setting, "", setting.base)
    names = ("seq_len", "batch", "heads", "head_dim", "dtype", "is_causal", "compiled")
    wanted = {name: shared[name] for name in names}
    for row in rows:
        its = row["parameters"]
        if wanted.items() <= its.items() and its.get("branches", its.get("segment_lengths")) == shared["branches"]:
            yield row


def inputs_of(base: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return base.inputs(device)[0]


def error_and_peak(setting: Setting, case: Case | None, call: Call, device: torch.device) -> dict[str, float]:
    """Return by name the call's relative error in norm over ROWS rows, against `case` in float64 if that is given, and
    in plain settings the bytes that it adds at its peak, if the system says.

    There a second call is measured: the first also loads operators and makes plans. For dense attention at 2,048
    tokens, these take 1.8 of its 6.4 MiB.
    """
    inputs, found = inputs_of(setting.base, device), {}
    outs: list[Tensor] = []
    with torch.no_grad():
        if setting.plain:
            call(*inputs)
        peak = measure.peak_above_now(lambda: outs.append(call(*inputs)), device)
    if case is not None:
        q, k, v = (x.cpu() for x in inputs)
        rows = rows_of(setting.base, ROWS)
        expected = exact(case, q, k, v, rows)
        found["error"] = float((outs[0][:, rows].double().cpu() - expected).norm() / expected.norm())
    if setting.plain and peak is not None:
        found["peak memory, bytes"] = float(peak)
    return found


def table(rows: Sequence[Record]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headings, and the cells of each row; `rows` are of one setting (`rows_at`)."""
    headings = ("variant", "forward ms", "/ dense", "+ backward", "MiB", "error", "keys", "share")
    return headings, [(_name(row), *_cells(row)) for row in rows]


def _name(row: Record) -> str:
    """Return the name of a variant, with why it has no figures, or what is wrong with its results."""
    name, figures = str(row["parameters"]["variant"]), row.get("figures", {})
    if row["value"] is None:
        return f"{name}: {row['refused']}"
    least, greatest = (figures.get(f"row sum, {end}", 1.0) for end in ("least", "greatest"))
    if not 0.99 < least <= greatest < 1.01:
        name += f" (rows sum to {least:.3g} to {greatest:.3g})"
    return name if figures.get("depends on other tokens", 1.0) else f"{name} (no token sees another)"


def _cells(row: Record) -> tuple[str, ...]:
    figures, both = row.get("figures", {}), row.get("times", {}).get("forward+backward")
    if row["value"] is None:
        return ("",) * 7
    shown = (("peak memory, bytes", 2**-20, ",.0f"), ("error", 1, ".1e"), ("keys reached", 1, ",.0f"))
    return (
        f"{row['value']:.3g}",
        f"{row['over']['dense']['median']:.2f}" if row.get("over") else "",
        "" if both is None else f"{1e3 * both['median']:.3g}",
        *(f"{figures[name] * unit:{form}}" if name in figures else "" for name, unit, form in shown),
        f"{figures['share of score entries']:.1%}" if "share of score entries" in figures else "",
    )
