"""The engine's errors.

    EngineError
    ├── ModelConfigError    config.json cannot be read, or asks for what is not supported
    ├── WeightsError        weights missing, of the wrong shape, or in a format that is not loaded
    ├── ProfileError        a latency profile cannot be read or used (latency_profile.py)
    ├── OutOfMemoryError    the KV cache does not fit; names what would fit, and the option to lower
    ├── DeviceLostError     this process has lost its GPU; another process has to replace it
    └── GrammarError        a grammar that cannot be compiled or followed; the fault of one request

Each message states what was wrong, what is allowed and what to do.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors of this folder."""


class ModelConfigError(EngineError):
    """The model's configuration cannot be served."""


class WeightsError(EngineError):
    """The model's weights cannot be loaded."""


class OutOfMemoryError(EngineError):
    """The KV cache does not fit into memory."""


class DeviceLostError(EngineError):
    """The GPU's context is lost: every further step would fail."""


class GrammarError(EngineError):
    """A request's grammar cannot be compiled, or not be followed."""
