"""The operations of a decoder, with one implementation per device, imported on demand."""

from __future__ import annotations

import importlib

from llm_serving.backends.base import Backend
from llm_serving.errors import ConfigError

__all__ = ["BACKENDS", "Backend", "create_backend"]

BACKENDS = {
    "cpu": ("llm_serving.backends.cpu", "CpuBackend"),
    "ascend": ("llm_serving.backends.ascend", "AscendBackend"),
    "ascend_fast": ("llm_serving.backends.ascend", "FastAscendBackend"),
    "ascend_invariant": ("llm_serving.backends.ascend_invariant", "AscendInvariantBackend"),
    "plain": ("llm_serving.backends.plain", "PlainBackend"),
}


def create_backend(name: str, dtype: str) -> Backend:
    """Create a backend for a model dtype. Call this before the first operator of the process: MindSpore looks for
    plugins only once. Raise ConfigError for an unsupported dtype, KernelError if a library cannot be used.
    """
    if name not in BACKENDS:
        raise ConfigError(f"`backend` must be one of {', '.join(BACKENDS)}. Given: {name}")
    module, class_name = BACKENDS[name]
    backend: Backend = getattr(importlib.import_module(module), class_name)(dtype)
    return backend
