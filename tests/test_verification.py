"""`info --check`: what it finds right, and that it would find what is wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from dilated_attention.backends.table import BACKENDS
from dilated_attention.errors import BackendError
from dilated_attention_lab import verification
from dilated_attention_lab.commands import main

CPU = torch.device("cpu")
ONE = replace(verification.kinds(50)[0], batch=1)


def test_calls_of_each_kind():
    assert len(verification.kinds()) == 19


def test_this_machine_is_right(capsys, monkeypatch):
    monkeypatch.setattr(verification, "kinds", partial(verification.kinds, 60))
    assert main(["info", "--check", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert all(check.name in printed for check in verification.kinds())
    assert "not triton: Triton needs a GPU" in printed
    assert printed.splitlines()[-1].endswith("native: right")


@pytest.mark.parametrize(
    ("forward", "cell", "why"),
    [
        (lambda out: out * 1.001, "WRONG", "is off by"),
        (lambda out: out.sqrt(), "WRONG inf", "is off by inf"),
        (lambda out: out.view(-1).view(7, -1), "FAILED", "RuntimeError: shape"),
    ],
    ids=["by rounding and more", "NaN", "raises"],
)
def test_what_is_wrong_is_found(forward, cell, why, monkeypatch, capsys):
    native = BACKENDS["native"]

    def broken(*arguments, **options):
        out, lse = native.forward(*arguments, **options)
        return forward(out), lse

    monkeypatch.setitem(BACKENDS, "native", replace(native, forward=broken))
    monkeypatch.setattr(verification, "kinds", lambda: [ONE])
    assert main(["info", "--check", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert cell in printed
    (line,) = (line for line in printed.splitlines() if line.startswith("native, two branches: "))
    assert why in line


def test_a_row_that_is_not_written_is_found(monkeypatch):
    """Memory is handed out as NaN: it might hold the right numbers of an earlier call."""
    native = BACKENDS["native"]

    def leaves_a_row(*arguments, **options):
        out, lse = native.forward(*arguments, **options)
        written = out.new_empty(out.shape)
        written[:, :-1] = out[:, :-1]
        return written, lse

    monkeypatch.setitem(BACKENDS, "native", replace(native, forward=leaves_a_row))
    (verdict,) = verification.verdicts(ONE, ["native"], CPU)
    assert str(verdict) == "WRONG inf"
    assert verdict.why.startswith("out is")
    assert "new_empty" not in vars(torch.Tensor), "memory is no longer filled"


def test_a_refusal_is_no_fault():
    def refuses(*arguments, **options):
        raise BackendError("not this one")

    check = replace(ONE)
    object.__setattr__(check, "run", refuses)
    (verdict,) = verification.verdicts(check, ["native"], CPU)
    assert (str(verdict), verdict.right, verdict.why) == ("refused", True, "not this one")


def test_device_goes_with_check(capsys):
    assert main(["info", "--device", "cpu"]) == 2
    assert "goes with --check" in capsys.readouterr().err
