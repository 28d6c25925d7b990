"""Draw the pictures of docs/explorer.html for the documents, with the Chromium on PATH."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Literal

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parents[1]
VIEWS: dict[str, tuple[str, Literal["light", "dark"], tuple[int, int]]] = {
    "explorer": ("#n=192&segments=32,96,192&rates=1,2,4&heads=4&causal=1&head=1&query=147", "light", (1180, 900)),
    "explorer-dark": (
        "#n=512&kind=product&segments=256,512&rates=1,2&heads=2&window=32&global=16&query=300",
        "dark",
        (1180, 900),
    ),
    "explorer-phone": ("#n=96&segments=16,96&rates=1,4&heads=4&query=50", "light", (390, 844)),
}


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        print("screenshots: error: no chromium on PATH; on Debian: apt-get install chromium", file=sys.stderr)
        return 2
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        for name, (state, scheme, (width, height)) in VIEWS.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto((DOCS / "explorer.html").as_uri() + state)
            if name == "explorer-phone":
                page.locator("#picture").scroll_into_view_if_needed()
                page.evaluate("document.getElementById('picture').scrollIntoView()")
            path = DOCS / "pictures" / f"{name}.png"
            page.screenshot(path=path)
            print(f"written: {path}")
        browser.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
