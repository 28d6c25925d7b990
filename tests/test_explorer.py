"""The arithmetic of docs/explorer.html equals the library's, in headless Chromium."""

from __future__ import annotations

import functools
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Page, sync_playwright

from dilated_attention import BlockLayout, Dilated, suggest_pattern
from dilated_attention.backends.reference import count_matrix

PAGE = Path(__file__).parents[1] / "docs" / "explorer.html"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: on Debian, apt-get install chromium")

State = dict[str, str]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        failures: list[str] = []
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("request", lambda request: failures.append(request.url) if request.url[:4] == "http" else None)
        page.goto(PAGE.as_uri())
        yield page
        browser.close()
        assert not failures


def draw(random: random.Random) -> State:
    """A state of the page as a reader may type it, right or wrong."""
    branches = random.randint(1, 4)
    rates = [random.choice((1, 1, 2, 3, 4, 5, 8)) for _ in range(branches)]
    heads = random.randint(1, 6)
    table = [[random.randint(-1, rate - 1) for _ in range(heads)] for rate in rates]
    kind = random.choice(("dilated", "dilated", "product", "blocks"))
    parts = {
        "window": str(random.randint(1, 90)),
        "global": str(random.randint(1, 40)),
        "stride": str(random.randint(1, 100)),
        "block_rates": ",".join(str(random.randint(1, 5)) for _ in range(random.randint(1, 3))),
    }
    chosen = random.sample(sorted(parts), random.randint(1, 3))
    return {
        "n": str(random.randint(1, 260)),
        "heads": str(heads),
        "dim": "8",
        "causal": random.choice("01"),
        "kind": kind,
        "segments": ", ".join(str(random.randint(1, 300)) for _ in range(branches)),
        "rates": ", ".join(map(str, rates)),
        "offsets": random.choice(("head", "head_block", "groups", "table")),
        "table": "; ".join(", ".join(map(str, row)) for row in table),
        "block": str(random.choice((16, 17, 32, 48))),
        "reach": str(random.randint(1, 4)),
        **{name: value if name in chosen else "" for name, value in parts.items()},
    }


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def dilated(state: State) -> Dilated:
    if state["kind"] == "blocks":
        return Dilated((int(state["n"]),), (1,))
    offsets: Any = state["offsets"]
    if offsets == "table":
        offsets = tuple(numbers(row) for row in state["table"].split(";"))
    groups = offsets == "groups"
    return Dilated(numbers(state["segments"]), numbers(state["rates"]), "head" if groups else offsets, groups)


def layout(state: State, length: int) -> BlockLayout:
    """The union of what is filled in, without causality, as the page's Python code builds it."""
    size, parts = int(state["block"]), []
    if state["window"]:
        parts.append(BlockLayout.local(length, int(state["window"]), size))
    if state["global"]:
        parts.append(BlockLayout.global_(length, int(state["global"]), size))
    if state["stride"]:
        parts.append(BlockLayout.strided(length, int(state["stride"]), size))
    if state["block_rates"]:
        parts.append(BlockLayout.dilated(length, numbers(state["block_rates"]), int(state["reach"]), size))
    return functools.reduce(lambda a, b: a | b, parts)


def expected(state: State) -> torch.Tensor:
    """The library's count matrix, (heads, queries, keys)."""
    pattern, seq_len = dilated(state), int(state["n"])
    visible: Callable[[int, slice, slice], torch.Tensor] | None = None
    if state["kind"] != "dilated":
        whole = functools.cache(lambda count: layout(state, count).dense_mask()[0])

        def shown(count: int, rows: slice, columns: slice) -> torch.Tensor:
            return whole(count)[:, rows, columns]

        visible = shown
    return count_matrix(
        pattern.segment_lengths,
        pattern.dilation_rates,
        pattern.offset_table(int(state["heads"])),
        seq_len,
        is_causal=state["causal"] == "1",
        visible=visible,
    )


COMPUTE = """states => states.map(state => {
    let pattern;
    try { pattern = explorer.parse(state); } catch (error) { return {error: error.message}; }
    const heads = Array.from({length: pattern.heads}, (_, h) => h), query = pattern.n >> 1;
    return {
        counts: heads.map(h => [...explorer.counts(pattern, h)]),
        keys: heads.map(h => [...explorer.keys(pattern, h, query)]),
        image: [...explorer.image(pattern, 0, 7)],
        entries: explorer.entries(pattern),
        unserved: explorer.unserved(pattern).map(x => x.nobody),
        python: explorer.python(pattern),
    };
})"""


def test_random_patterns_show_what_the_library_shows(page):
    generator = random.Random(0)
    states = [draw(generator) for _ in range(200)]
    right = wrong = 0
    for state, found in zip(states, page.evaluate(COMPUTE, states), strict=True):
        try:
            counts = expected(state)
        except ValueError:
            counts = None
        if counts is None:
            assert "error" in found, state
            wrong += 1
            continue
        assert "error" not in found, (state, found)
        right += 1
        assert found["counts"] == counts.sum(-1).tolist(), state
        assert found["entries"] == counts.sum()
        assert tuple(found["unserved"]) == dilated(state).unserved(int(state["heads"]))
        seq_len = counts.shape[1]
        for row, keys in zip(counts[:, seq_len // 2], found["keys"], strict=True):
            assert keys == [[j, int(times)] for j, times in enumerate(row) if times], state
        cell = torch.arange(seq_len) * 7 // seq_len
        image = torch.zeros(7, 7, dtype=torch.int64).index_put_(
            (cell[:, None].expand(seq_len, seq_len), cell.expand(seq_len, seq_len)), counts[0].long(), accumulate=True
        )
        assert found["image"] == image.flatten().tolist(), state
    assert right >= 125
    assert wrong >= 10


def test_long_patterns_have_the_coverage_and_the_cost_of_the_library(page):
    for segments, rates, offsets, heads, n in (
        ((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16), "head_block", 5, 40_013),
        ((2048, 4096, 8192), (1, 2, 4), "head", 3, 2**16 + 1),
    ):
        pattern = Dilated(segments, rates, offsets)
        state = {
            "n": str(n),
            "heads": str(heads),
            "segments": ",".join(map(str, segments)),
            "rates": ",".join(map(str, rates)),
            "offsets": offsets,
        }
        found = page.evaluate(
            """state => { const p = explorer.parse(state);
            return [p.classes.map(heads => [...explorer.counts(p, heads[0])]), p.classes,
                    explorer.entries(p), explorer.entries({...p, causal: true})]; }""",
            state,
        )
        coverage = pattern.coverage(n, heads)
        for counts, same in zip(found[0], found[1], strict=True):
            assert all(torch.equal(coverage[head], torch.tensor(counts, dtype=torch.int64)) for head in same)
        assert 4 * 64 * found[2] == pattern.flops(n, heads, 64)
        assert 4 * 64 * found[3] == pattern.flops(n, heads, 64, is_causal=True)


def test_the_python_code_runs_and_is_the_pattern(page):
    generator = random.Random(1)
    states = [draw(generator) for _ in range(60)]
    ran = 0
    for state, found in zip(states, page.evaluate(COMPUTE, states), strict=True):
        if "error" in found:
            continue
        names: dict[str, Any] = {}
        exec(found["python"], names)
        pattern = names["pattern"]
        if state["kind"] == "dilated":
            assert pattern == dilated(state)
        elif state["kind"] == "blocks":
            assert pattern == layout(state, int(state["n"]))
        else:
            assert pattern.dilated == dilated(state)
            assert pattern.layout(100) == layout(state, 100)
        assert names["out"].shape == (1, int(state["n"]), int(state["heads"]), 8)
        ran += 1
    assert ran >= 30


def test_the_address_keeps_the_pattern_and_the_query(page):
    page.goto(f"{PAGE.as_uri()}#n=100&segments=25,50&rates=1,5&heads=3&causal=1&head=2&query=40")
    assert page.input_value("#segments") == "25,50"
    assert page.is_checked("#causal")
    pattern = Dilated((25, 50), (1, 5))
    keys = count_matrix((25, 50), (1, 5), pattern.offset_table(3), 100, is_causal=True)[2, 40].nonzero().flatten()
    text = page.inner_text("#seen")
    assert text.startswith(f"Query 40 of head 2 sees {len(keys)} keys")
    assert re.findall(r"\d+", text.partition(": ")[2])[0] == str(int(keys[0]))
    page.fill("#segments", "25, 100")
    page.wait_for_function("location.hash.includes('segments=25,100')")
    assert "head=2&query=40" in page.url
    page.focus("#matrix")
    page.keyboard.press("ArrowDown")
    assert "query=41" in page.url
    assert page.inner_text("#seen").startswith("Query 41")


def test_suggestions_are_those_of_the_library(page):
    generator = random.Random(2)
    cases = []
    for _ in range(300):
        budget = f"{2 ** generator.uniform(-9, 0):.4f}" if generator.random() < 0.5 else str(generator.randint(1, 3000))
        heads = generator.choice((1, 2, 3, 4, 6, 8, 12, 16, 24, 64))
        cases.append((int(2 ** generator.uniform(0, 20)), heads, generator.random() < 0.5, budget))
    suggested = page.evaluate(
        "cases => cases.map(c => { try { return explorer.suggest(...c); } catch (error) { return error.message; } })",
        cases,
    )
    refused = 0
    for (n, heads, is_causal, text), found in zip(cases, suggested, strict=True):
        try:
            pattern = suggest_pattern(n, heads, budget=float(text) if "." in text else int(text), is_causal=is_causal)
            expected = {"segments": list(pattern.segment_lengths), "rates": list(pattern.dilation_rates)}
        except ValueError as error:
            refused += 1
            found = re.search(r"at least (\S+),", found)[1]
            expected = re.search(r"at least budget=(\S+),", str(error))[1]
        assert found == expected, (n, heads, is_causal, text)
    assert 20 <= refused <= 200


def test_it_starts_with_a_causal_pattern_and_its_row_in_view(page):
    page.goto("about:blank")
    page.goto(PAGE.as_uri())
    assert page.is_checked("#causal")
    row = page.evaluate(
        "(() => { const box = document.getElementById('matrix').getBoundingClientRect();"
        "return box.top + box.height * Number(document.getElementById('query').value) / 256; })()"
    )
    assert 0 < row < 900
    page.click("#causal")
    page.wait_for_function("!location.hash.includes('causal')")
    page.reload()
    assert not page.is_checked("#causal")


def test_buttons_suggest_preset_and_copy(page):
    page.goto("about:blank")
    page.goto(PAGE.as_uri())
    page.fill("#n", "32768")
    page.fill("#heads_count", "8")
    page.fill("#budget", "0.1")
    page.click("#suggest")
    pattern = suggest_pattern(32768, 8, budget=0.1, is_causal=True)
    assert numbers(page.input_value("#segments")) == pattern.segment_lengths
    share = pattern.flops(32768, 8, 1, True) / Dilated((32768,), (1,)).flops(32768, 8, 1, True)
    assert f"{share:.2%}".replace("%", " %") in page.inner_text("#suggested")
    page.fill("#budget", "8")
    page.click("#suggest")
    assert page.inner_text("#suggested").startswith("A budget of 8 is too small")
    page.select_option("#preset", "GigaPath, slide encoder")
    assert page.input_value("#offsets") == "head_block"
    assert not page.is_checked("#causal")
    assert "1048576" in page.inner_text("#python")
    page.click("#copy")
    page.wait_for_function("document.getElementById('copy').textContent !== 'Copy'")


def test_residues_without_a_head_are_named(page):
    page.goto("about:blank")
    page.goto(f"{PAGE.as_uri()}#n=64&segments=16,64&rates=1,8&heads=4")
    assert "Residues that no head serves: 4 of 8 in branch (64, 8)." in page.inner_text("#unserved")
    page.goto("about:blank")
    page.goto(f"{PAGE.as_uri()}#n=64&segments=16,64&rates=1,4&heads=4")
    assert page.inner_text("#unserved") == ""


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("n", "0", "Tokens must be a whole number from 1 to 1048576; got 0."),
        ("n", "", "Tokens must be a whole number from 1 to 1048576; got nothing."),
        ("segments", "64,x", "Segment lengths must be whole numbers of at least 1, separated by commas; got 64,x."),
        ("rates", "1,2", "Segment lengths and dilation rates must have one entry a branch each; got 3 and 2."),
        ("segments", "64,1,1", "No token could take part in the branch of segment 1 and rate 4"),
        ("heads_count", "<b>", "Heads must be a whole number from 1 to 64; got <b>."),
    ],
)
def test_wrong_input_gives_one_line(page, field, text, message):
    table = "0,0,0,0;0,0,0,0;1,2,3,1"
    page.goto("about:blank")
    page.goto(f"{PAGE.as_uri()}#offsets=table&table={table}")
    assert page.inner_text("#error") == ""
    page.fill(f"#{field}", text)
    page.wait_for_function("document.getElementById('error').textContent !== ''")
    assert page.inner_text("#error").startswith(message)
    assert "\n" not in page.inner_text("#error")


def test_it_fits_a_phone_and_every_field_has_a_label(page):
    page.goto("about:blank")
    page.goto(f"{PAGE.as_uri()}#kind=product&offsets=table&table=0,0,0,0;0,1,0,1;0,1,2,3")
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.goto("about:blank")
    page.goto(f"{PAGE.as_uri()}#n=100000&segments=1024,5792,32768,185363,1048576&rates=1,2,4,8,16&heads=16")
    tables = "[...document.querySelectorAll('.scroll')].map(box => box.scrollWidth - box.clientWidth)"
    assert page.evaluate(tables) == [0, 0]
    page.set_viewport_size({"width": 1200, "height": 900})
    unlabelled = "[...document.querySelectorAll('input, select')].filter(x => !x.labels.length).map(x => x.id)"
    assert page.evaluate(unlabelled) == []
    assert page.evaluate("[...document.querySelectorAll('canvas[role=img]')].every(x => x.ariaLabel)")
