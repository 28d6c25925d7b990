"""Errors that this library raises in addition to `ValueError`."""

from __future__ import annotations

from importlib import import_module


class UnsupportedError(ValueError):
    """Report a valid request that this version, device or backend cannot serve.

    The message says what can be served.
    """


class BackendError(UnsupportedError):
    """Report that no backend can serve the call. The message lists why each one refused."""


class ContextParallelError(RuntimeError):
    """Report a failed exchange between ranks. The group cannot be used again.

    The message names the rank, the layer, the plan, and the step that failed.
    """


class MissingPackageError(ImportError):
    """Report a missing optional package; the message says what to install."""


def require(name: str) -> None:
    """Raise MissingPackageError unless the package can be imported."""
    try:
        import_module(name)
    except ModuleNotFoundError:
        raise MissingPackageError(f"{name} is not installed: pip install {name}", name=name) from None
