"""An engine listener made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llm_serving.engine.observers import EngineListener


class FunctionListener(EngineListener):
    """A listener that calls a function for each given event: `FunctionListener(on_migrating=list.extend)`."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            assert hasattr(EngineListener, name), name
            setattr(self, name, function)
