"""The errors this library raises beyond `ValueError`."""

from __future__ import annotations

from importlib import import_module


class UnsupportedError(ValueError):
    """Report a correct request that this version, device or backend cannot serve.

    The message says what can be served.
    """


class BackendError(UnsupportedError):
    """Report that no backend can serve the call. The message lists why each one refused."""


class ContextParallelError(RuntimeError):
    """An exchange between ranks failed. The group cannot be used again; the message names rank, place and plan."""


class MissingPackageError(ImportError):
    """An optional package is missing; the message says what to install."""


def require(name: str) -> None:
    """Raise MissingPackageError unless the package can be imported."""
    try:
        import_module(name)
    except ModuleNotFoundError:
        raise MissingPackageError(f"{name} is not installed: pip install {name}", name=name) from None
