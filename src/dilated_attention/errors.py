"""The errors this library raises beyond `ValueError`."""

from __future__ import annotations


class UnsupportedError(ValueError):
    """A correct request that this version, device or backend cannot serve. The message says what would."""


class BackendError(UnsupportedError):
    """No backend can serve the call; the message lists why each one refused."""


class ContextParallelError(RuntimeError):
    """An exchange between ranks failed. The group is not used again; the message names rank, place and plan."""
