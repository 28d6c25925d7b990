"""Provide MkDocs hooks: rewrite links into the repository, and check every link of the built site."""

from __future__ import annotations

import argparse
import logging
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from dilated_attention_lab.commands import COMMANDS, Parser

log = logging.getLogger("mkdocs.hooks")  # warnings of these loggers fail a strict build
ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()((?:\.\./)+)([^)\s#]+)")


def _shown() -> list[Path]:
    """Return the files outside docs/ that pages may link to; they become part of the site."""
    return [
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        ROOT / "SECURITY.md",
        *sorted(path for path in (ROOT / "examples").iterdir() if path.is_file()),
        *sorted(path for path in (ROOT / "results").rglob("*") if path.is_file()),
    ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in _shown():
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    files.append(File.generated(config, "commands.md", content=_commands()))
    places = Counter(file.dest_uri for file in files if not file.inclusion.is_excluded())
    for place in sorted(place for place, count in places.items() if count > 1):
        log.warning("%s: two files of the repository become this page", place)
    return files


def _commands() -> str:
    """Return the reference of the command line, from the parsers themselves."""
    lines = [
        "# Commands",
        "",
        "Look up every option of `dilated-attention`. This page is made from the parsers, like `--help`.",
    ]
    for name, about in COMMANDS.items():
        parser = Parser(prog=f"dilated-attention {name}", command=name)
        parser.complete()
        lines += ["", f"## {name}", "", f"`dilated-attention {name}`: {about}.", "", _plain(parser.description), ""]
        lines += ["| argument | meaning |", "|---|---|"]
        lines += [_option(action) for action in parser._actions if action.dest != "help"]
        lines += ["", _plain(parser.epilog)]
    return "\n".join(lines) + "\n"


def _option(action: argparse.Action) -> str:
    """Return a command's argument as a line of a Markdown table."""
    values = action.metavar or (",".join(map(str, action.choices)) if action.choices else action.dest.upper())
    if not action.option_strings:
        call = str(action.metavar or action.dest)
    else:
        call = " ".join([", ".join(action.option_strings), *([str(values)] if action.nargs != 0 else [])])
    code = "<code>" + call.replace("|", "&#124;").replace("<", "&lt;") + "</code>"  # a pipe would end the cell
    about = _plain(action.help).replace("%(default)s", str(action.default)).replace("%%", "%")
    return f"| {code} | {about} |"


def _plain(text: str | None) -> str:
    """Return help as one line that Markdown does not take for markup."""
    return re.sub(r"([<>*_|])", r"\\\1", " ".join((text or "").split()))


def _decisions() -> str:
    """Return the list of decisions, by their titles."""
    lines = ["", "## All decisions", ""]
    for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


def _results() -> str:
    """Return a table of every file of results with its number of rows."""
    lines = ["", "## All files", "", "| file | rows |", "|---|---|"]
    for path in sorted((ROOT / "results").rglob("*.jsonl")):
        name = path.relative_to(ROOT / "results").as_posix()
        lines.append(f"| [{name}](results/{name}) | {len(path.read_text(encoding='utf-8').splitlines())} |")
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave docs/ so that they stay inside the site, to which `on_files` added their targets."""
    depth = page.file.src_uri.count("/")
    inside = page.file.src_uri.startswith(("results/", "examples/")) or page.file.src_uri in (
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
    )
    if inside:  # the other way: these files lie above docs/
        return re.sub(r"(?<=\]\()(?:\.\./)?docs/", "../" * depth, markdown)

    def shorten(link: re.Match[str]) -> str:
        ups = link[1].count("../")
        return ("../" * depth if ups > depth else link[1]) + link[2]

    added = {"machines.md": _results, "decisions/README.md": _decisions}.get(page.file.src_uri, str)
    return LINK.sub(shorten, markdown) + added()


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag != "link" or given.get("rel") != "canonical":
            self.links += [given[name] for name in ("href", "src") if given.get(name)]


def on_post_build(config: MkDocsConfig) -> None:
    """Warn of links to the site itself that lack their file or anchor. Links to other hosts are not fetched."""
    site = Path(config.site_dir)
    pages: dict[Path, _Page] = {}
    for path in site.rglob("*.html"):
        pages[path] = _Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    for path, page in pages.items():
        if path.name == "404.html":
            continue
        for link in page.links:
            url, anchor = urldefrag(link)
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                log.warning("%s: dead link %s", path.relative_to(site), link)
            elif (
                anchor
                and target in pages
                and unquote(anchor) not in pages[target].anchors
                and target.stem != "explorer"
            ):
                log.warning("%s: no anchor for %s", path.relative_to(site), link)
