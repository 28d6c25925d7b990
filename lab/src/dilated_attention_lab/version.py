"""Say which version of the library runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Return the version of the library, as installed."""
    try:
        return version("dilated-attention")
    except PackageNotFoundError:
        return "source tree, not installed"
