"""Each option of each command, given what it cannot be: one line on stderr and exit code 2, never a traceback.

The options are argparse's own, so that a new one is tried as well. Commands run in this process at tiny sizes, up to
the work itself where that is a training, or a process of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.patterns import Dilated
from dilated_attention_lab.bench import check, command, compare, simulate
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.suites import Step, strategies
from dilated_attention_lab.commands import command_line, main
from dilated_attention_lab.training import demo, session, writing
from test_checkpoints import Golden

HUGE, LARGER = "1000000000000000000", str(1 << 64)  # LARGER: than what a tensor or a seed can be
INTEGERS = ("x", "", "0", "-1", "nan", "1.5", HUGE, LARGER)
NUMBERS = ("x", "", "0", "-1", "nan", "inf", "1e300")
LISTS = ("x", "", "0", "-1", "1,,2", "4,4,4", HUGE, LARGER)
WORDS = ("", "warp")

TINY = {"--context": 64, "--steps": 2, "--layers": 1, "--dim": 16, "--heads": 2}
SHAPE = {"--tokens": 64, "--heads": 2, "--head-dim": 16}
BRANCHES = {"--segments": "16,32", "--rates": "1,2"}
WORLD = {"--tokens": 512, "--ranks": 8, "--least": 8, "--heads": 2, "--head-dim": 8, "--segment": 64}
# The pattern that an option of `plot` is of, where that is not the dilated one.
PATTERNS = {
    "--window": ("local", {"--window": 65}),
    "--block-size": ("local", {"--window": 65}),
    "--global-tokens": ("global", {"--global-tokens": 16}),
    "--stride": ("strided", {"--stride": 32}),
    "--block-rates": ("dilated-blocks", {"--block-rates": "1,4", "--reach": 1}),
    "--reach": ("dilated-blocks", {"--block-rates": "1,4", "--reach": 1}),
    "--levels": ("hierarchical", {"--levels": "1:64,256:"}),
    "--density": ("random", {"--density": 0.25}),
    "--seed": ("random", {"--density": 0.25}),
    "--random-blocks": ("bigbird", {"--window": 64, "--global-tokens": 1, "--random-blocks": 2}),
}


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (action for action in command_line()._actions if isinstance(action, argparse._SubParsersAction))
    for parser in found.choices.values():
        parser.complete()
    return dict(found.choices)


def name_of(action: argparse.Action) -> str:
    return (action.option_strings or [action.dest])[-1]


def options() -> list[tuple[str, str]]:
    return [
        (name, name_of(action))
        for name, parser in commands().items()
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction)
    ]


def test_every_command_has_options():
    assert {name for name, _ in options()} == commands().keys()


def wrong(name: str, action: argparse.Action, tmp_path: Path) -> Iterator[object]:
    """Yield wrong values for an option. No one can create a path below a file, whoever runs the tests."""
    garbage = tmp_path / "garbage"
    garbage.write_bytes(bytes(range(255, -1, -1)) * 4)
    if action.nargs == 0:
        yield "x"
    elif action.choices is not None:
        yield from WORDS
    elif action.type is Path or action.dest == "what":
        yield from ("", tmp_path / "none" / "such", tmp_path, garbage, garbage / "below", tmp_path / ("n" * 300))
    elif action.type is float:
        yield from NUMBERS
    elif action.type in (str, None):
        yield from WORDS
    elif action.type.__name__.startswith("list of"):
        yield from LISTS
    else:
        yield from INTEGERS


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    """text, weights, a model of bytes, a folder of results."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "text").write_bytes(bytes(i * i % 251 for i in range(5000)))
    save_file(Golden("ts_longnet_decoder_xpos").weights, folder / "weights")
    config = LongNetConfig(embed_dim=16, num_layers=1, num_heads=2, pattern=Dilated((16, 64), (1, 4)))
    LongNetLM(config).save_pretrained(folder / "model")
    (folder / "page.md").write_text("no figures")
    (folder / "results" / "cpu").mkdir(parents=True)
    (folder / "results" / "cpu" / "some.jsonl").write_text("")
    return folder


def right(name: str, option: str, given: Path, out: Path) -> tuple[dict[str, object], dict[str, object]]:
    """Arguments by position and by option under which the command runs, and reads the option."""
    if name == "plot" and option == "--documents":
        return {"what": given / "results"}, {"--out": out, "--documents": given / "page.md"}
    if name == "plot":
        what, its = PATTERNS.get(option, ("dilated", {**BRANCHES, "--heads": 2}))
        return {"what": what}, {**its, "--tokens": 1024, "--out": out / "a.png"}
    branches = {**BRANCHES, "--tokens": 20}
    return {
        "demo": ({}, {"--out": out}),
        "train": ({"paths": given / "text"}, {**TINY, "--warmup": 1, "--out": out}),
        "generate": ({"model": given / "model"}, {"--bytes": 2}),
        "convert": ({"checkpoint": given / "weights", "out": out}, {"--kind": "torchscale", **branches}),
        "suggest": ({}, {"--tokens": 4096, "--heads": 8, "--budget": 0.5}),
        "info": ({}, {}),
        "compare": ({}, {"--only": "2,048 tokens, bfloat16", "--out": out}),
        "bench": ({"suite": "check"}, {}) if option == "--baseline" else ({"suite": "foundation"}, {"--out": out}),
        "profile": ({"method": "block-sparse-dilated"}, {**SHAPE, **BRANCHES, "--block-size": 16, "--out": out}),
        "simulate": ({}, {**WORLD, "--out": out}),
    }[name]


class Suite:
    @staticmethod
    def steps(device: torch.device, quick: bool) -> list[Step]:
        row = Row(name="figure", parameters={"seq_len": 1, "heads": 1}, value=1.0, unit="x")
        return [Step("one", lambda: iter([row]))]


@pytest.fixture
def no_work(monkeypatch):
    """Trainings end before their first step, rehearsals and suites at once, texts after two pieces."""
    write = writing.write
    ended = [simulate.Rehearsal, "auto", (1.0,), (1.0,), 1, 1, 1, 1, 1, 1]
    monkeypatch.setattr(session, "run", lambda *arguments, **options: 0)
    monkeypatch.setattr(demo, "_recall", lambda *arguments: {})
    monkeypatch.setattr(demo, "_text", lambda *arguments: {})
    monkeypatch.setattr(demo, "Demo", lambda **found: sys.exit(0))
    monkeypatch.setattr(writing, "write", lambda *arguments, **options: islice(write(*arguments, **options), 2))
    monkeypatch.setattr(simulate, "rehearse", lambda worlds: [ended[0](worlds[0], *ended[1:])])
    monkeypatch.setattr(compare, "measured", lambda *arguments: Suite.steps(*arguments)[0].measure())
    monkeypatch.setattr(strategies, "measured", lambda case, *_: iter([Row("figure", case.parameters, 1.0, "x")]))
    monkeypatch.setattr(check, "GUARDS", ())
    monkeypatch.setitem(command.SUITES, "foundation", Suite)


def exit_code(words) -> int:
    try:
        return main([str(word) for word in words])
    except SystemExit as ended:
        return ended.code


@pytest.mark.filterwarnings("ignore")  # of patterns that leave tokens out
@pytest.mark.parametrize(("name", "option"), options())
def test_wrong_values(name, option, given, no_work, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (action,) = (action for action in commands()[name]._actions if name_of(action) == option)
    refused = 0
    for number, value in enumerate(wrong(name, action, tmp_path)):
        positional, optional = right(name, option, given, tmp_path / str(number))
        if option.startswith("-"):
            optional[option] = value
        else:
            positional[option] = value
        code = exit_code([name, *positional.values(), *(f"{key}={value}" for key, value in optional.items())])
        said = [line for line in capsys.readouterr().err.splitlines() if line]
        assert code in (0, 2), (value, code, said)
        assert len(said) == (code == 2), (value, said)
        assert code == 0 or str(value) in said[0] or option.strip("-s") in said[0].replace("_", "-"), (value, said)
        refused += code == 2
    assert refused or option == "--only"


def test_the_right_values_are_right(given, no_work, tmp_path, capsys, monkeypatch):
    """Else what is refused above would be something else."""
    monkeypatch.chdir(tmp_path)
    every = [
        (name, right(name, option, given, tmp_path / name)) for name, option in options() if option != "--baseline"
    ]
    for number, (name, (positional, optional)) in enumerate({str(one): one for one in every}.values()):
        out = tmp_path / str(number)
        if "out" in positional:
            positional["out"] = out
        elif "--out" in optional:
            optional["--out"] = out / "a.png"
        words = [name, *positional.values(), *(f"{key}={value}" for key, value in optional.items())]
        assert exit_code(words) == 0, capsys.readouterr().err
