"""`explain` tells what the call does: the same backend, or the same refusal. Both print or run one `Call`."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance import random_calls
from dilated_attention import BlockLayout, Dilated, attention, explain, plan_cache
from dilated_attention.backends.blocks import calls_of
from dilated_attention.backends.table import BACKENDS

PATTERNS = {
    "dilated": Dilated((8, 32), (1, 2)),
    "layout": BlockLayout.local(32, 16, 16),
    "product": Dilated((32,), (2,)) * BlockLayout.local(16, 16, 16),
}


@st.composite
def calls(draw) -> dict[str, Any]:
    """Arguments that a backend may refuse, or that the choice rests on."""
    return {
        "heads": draw(st.sampled_from([2, 4])),
        "head_dim": draw(st.sampled_from([8, 16, 12, 264])),
        "batch": draw(st.sampled_from([1, 3])),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float8_e5m2])),
        "autocast": draw(st.sampled_from([False, False, True])),
        "pattern": draw(st.sampled_from(sorted(PATTERNS))),
        "masked": draw(st.booleans()),
        "options": {
            "backend": draw(st.sampled_from(["auto", "auto", "native", "triton", "reference", "other"])),
            "is_causal": draw(st.booleans()),
            "scale": draw(st.sampled_from([None, 0.5, -0.5, 0.0, float("nan")])),
            "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        },
    }


def answer(ask) -> str:
    try:
        return ask()
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


def both(call: dict[str, Any], ran: list[str]) -> tuple[str, str]:
    """Return what `explain` says, and what the call ran, which appends its backend to `ran`."""
    shape = call["batch"], 32, call["heads"], call["head_dim"]
    inputs = [torch.zeros(shape).to(call["dtype"]) for _ in range(3)]
    mask = torch.zeros(shape[:2], dtype=torch.bool) if call["masked"] else None
    options = {"pattern": PATTERNS[call["pattern"]], "key_padding_mask": mask, **call["options"]}

    def run() -> str:
        attention(*inputs, **options)
        return ran[-1]

    with torch.autocast("cpu", torch.bfloat16, enabled=call["autocast"]):
        return answer(lambda: explain(*inputs, **options).backend), answer(run)


def recording(ran: list[str], **changes) -> Any:
    """The registry with backends that note their names when they run. Calls that know the old ones are forgotten."""
    plan_cache.clear()

    def noted(name, function):
        return lambda *x, **y: ran.append(name) or function(*x, **y)

    return {
        name: replace(
            backend,
            forward=noted(name, changes.get("forward", backend.forward)),
            prepare=lambda *_: None,
            attend=backend.attend and noted(name, changes.get("attend", backend.attend)),
            **changes.get(name, {}),
        )
        for name, backend in BACKENDS.items()
    }


@random_calls(50)
@given(call=calls())
def test_on_the_cpu(call):
    """Backends are compared by what ran."""
    ran: list[str] = []
    with mock.patch.dict(BACKENDS, recording(ran)):
        said, done = both(call, ran)
    assert said == done


@random_calls(25)
@given(
    call=calls(),
    head_dims=st.sampled_from([(), (8, 16), (8, 16, 12, 264)]),
    needs=st.sampled_from([(), ("dropout_p",), ("dropout_p", "key_padding_mask", "a block layout")]),
    least=st.sampled_from([None, 1, 3000, 1 << 40]),
)
def test_where_other_backends_serve(call, head_dims, needs, least):
    """Simulates a GPU: triton refuses by head_dim and needs, and is faster above some work."""

    def refusal(facts):
        if facts.head_dim not in head_dims or facts.dtype == torch.float8_e5m2:
            return f"no head_dim {facts.head_dim} of {facts.dtype}"
        return next((f"no {name}" for name in facts.needs if name not in needs), None)

    def on_request(facts):
        return None if least is not None and facts.work >= least else f"slow at {facts.work}"

    def computed(q, *arguments, **options):
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])

    ran: list[str] = []
    there = {"triton": {"refusal": refusal, "on_request": on_request}}
    with mock.patch.dict(BACKENDS, recording(ran, forward=lambda problem, *x: computed(*x), attend=computed, **there)):
        said, done = both(call, ran)
    assert said == done


@pytest.mark.parametrize("name", ["scale", "dropout_p", "key_padding_mask", "is_causal", "head_offset"])
def test_what_the_call_refuses(name):
    q = torch.zeros(1, 32, 2, 8)
    for ask in (explain, attention):
        with pytest.raises(ValueError, match=f"{name}.* must be"):
            ask(q, q, q, PATTERNS["dilated"], **{name: "all"})


@pytest.mark.parametrize("name", ["layout", "product"])
def test_compat_is_of_dilated_patterns(name):
    q = torch.zeros(1, 32, 2, 8)
    with pytest.raises(ValueError, match="compat='torchscale' is of dilated patterns; leave it out with"):
        explain(q, q, q, PATTERNS[name], compat="torchscale")


CHOSEN = torch.rand(2, 2, 7, 7, generator=torch.Generator().manual_seed(0)) < torch.tensor([0.1, 0.9]).view(2, 1, 1, 1)
LISTS = {
    "shared": BlockLayout.local(100, 16, 16),
    "per head": BlockLayout.from_mask(CHOSEN[1], 100, 16),
    "per sample": BlockLayout.from_mask(CHOSEN[:, :1], 100, 16),
    "per sample and head": BlockLayout.from_mask(CHOSEN, 100, 16),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [[100, 50], [100, 100], [100, 0], [0, 0]])
@pytest.mark.parametrize("name", LISTS)
def test_padded_samples_have_the_first_tokens_of_their_own_lists(name, lengths, is_causal):
    layout, q = LISTS[name], torch.zeros(2, 100, 2, 8)
    pairs = 0
    for length, mask in zip(lengths, layout.dense_mask().expand(2, 2, -1, -1), strict=True):
        seen = mask[:, :length, :length]
        pairs += int((seen.tril() if is_causal else seen).sum())
    found = explain(q, q, q, layout, lengths=lengths, is_causal=is_causal)
    assert found.flops == 4 * 8 * pairs
    assert list(found.calls) == [length for length in dict.fromkeys(lengths) if length]
    if lengths == [100, 100]:
        assert found.calls[100] == calls_of(layout.causal() if is_causal else layout)
    on_meta = explain(*(q.to("meta"),) * 3, layout, lengths=lengths, is_causal=is_causal)
    assert (on_meta.groups, on_meta.flops, on_meta.calls) == (found.groups, found.flops, found.calls)


def test_packed_samples_have_the_first_tokens_of_a_layout():
    q, layout = torch.zeros(1, 150, 2, 8), LISTS["per head"]
    found = explain(q, q, q, layout, cu_seqlens=torch.tensor([0, 100, 150]))
    assert found.flops == 4 * 8 * int(layout.dense_mask().sum() + layout.prefix(50).dense_mask().sum())
    assert list(found.calls) == [100, 50]


def test_takes_the_options_of_attention():
    q = torch.zeros(1, 32, 2, 8)
    pattern = PATTERNS["dilated"]
    options = {name: x.default for name, x in signature(attention).parameters.items() if x.kind is x.KEYWORD_ONLY}
    assert str(explain(q, q, q, pattern, **options)) == str(explain(q, q, q, pattern, **options | {"return_lse": True}))
