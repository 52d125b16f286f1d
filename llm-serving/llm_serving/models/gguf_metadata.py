"""Typed access to the metadata of a GGUF file; an error names the key, the rule and the value."""

from __future__ import annotations

from typing import Any

import numpy as np

from llm_serving.errors import ModelError, shorten
from llm_serving.formats.gguf import GgufFile
from llm_serving.models.config_reader import MAX_LAYERS


class MetadataReader:
    """Reads metadata values of a file. `architecture` (`general.architecture`) is the prefix of the model's keys."""

    def __init__(self, found: GgufFile) -> None:
        self.found = found
        self.architecture = str(self.value("general.architecture", ""))

    def value(self, key: str, default: Any = None) -> Any:
        value = self.found.metadata.get(key)
        is_unread = value is None and key in self.found.metadata  # a list of strings
        if is_unread or isinstance(value, np.ndarray):
            raise self.fail(key, "must be one value and no list")
        return default if value is None else value

    def number(self, key: str) -> int | float | None:
        """Return a number; a float32 as its shortest decimal: 1e-5 and not 9.99999975e-06."""
        value = self.value(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        if not isinstance(value, float):
            raise self.fail(key, "must be a number")
        with np.errstate(over="ignore"):  # the rule of the key refuses infinity
            return float(str(np.float32(value)))

    def key(self, name: str) -> str:
        """Return the metadata key `<architecture>.<name>`."""
        return f"{self.architecture}.{name}"

    def own(self, name: str) -> int | float | None:
        """Return the number with the metadata key `<architecture>.<name>`."""
        return self.number(self.key(name))

    def numbers(self, name: str) -> list[int] | None:
        """Return the integers of the metadata key `<architecture>.<name>`, one for each layer; None for a number."""
        value = self.found.metadata.get(self.key(name))
        if not isinstance(value, np.ndarray):
            return None
        if len(value) > MAX_LAYERS or not np.issubdtype(value.dtype, np.integer) or (value < 0).any():
            raise self.fail(self.key(name), f"must be at most {MAX_LAYERS} integers >= 0")
        return [int(each) for each in value]

    def needed(self, name: str) -> int | float:
        value = self.own(name)
        if value is None:
            raise self.fail(self.key(name), "must be given")
        return value

    def has_tensor(self, name: str) -> bool:
        return name in self.found.tensors

    def fail(self, key: str, rule: str) -> ModelError:
        return ModelError(f"{self.found.file}: `{key}` {rule}. Given: {shorten(self.found.metadata.get(key))}")
