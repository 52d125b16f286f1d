"""Typed access to the metadata of a GGUF file, and the rules to convert the metadata of one architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from llm_serving.errors import ModelError, shorten
from llm_serving.formats.gguf import GgufFile
from llm_serving.models.config_reader import MAX_LAYERS

_LAYER: Final = re.compile(r"^blk\.\d+\.")


class MetadataReader:
    def __init__(self, found: GgufFile) -> None:
        self.found = found
        self.architecture = str(self.value("general.architecture", ""))
        self._of_layers = {_LAYER.sub("", name) for name in found.tensors}

    def value(self, key: str, default: Any = None) -> Any:
        value = self.found.metadata.get(key)
        is_unread = value is None and key in self.found.metadata  # a list of strings
        if is_unread or isinstance(value, np.ndarray):
            raise self.fail(key, "must be one value and no list")
        return default if value is None else value

    def number(self, key: str) -> int | float | None:
        """Return a number. A float32 becomes the shortest decimal that it stands for: 1e-5, not 9.99999975e-06."""
        value = self.value(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        if not isinstance(value, float):
            raise self.fail(key, "must be a number")
        with np.errstate(over="ignore"):  # the rule of the key refuses infinity
            return float(str(np.float32(value)))

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def own(self, name: str) -> int | float | None:
        return self.number(self.key(name))

    def of_layers(self, name: str) -> list[Any] | None:
        """Return the list of a key, with a number or flag for each layer, or None if it is absent or too long."""
        value = self.found.metadata.get(self.key(name))
        return value.tolist() if isinstance(value, np.ndarray) and len(value) <= MAX_LAYERS else None

    def numbers(self, name: str) -> list[int] | None:
        """Return the integers, one for each layer, of the key `<architecture>.<name>`, or None if it has no list."""
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

    def positive(self, name: str) -> int:
        value = self.needed(name)
        if not isinstance(value, int) or value < 1:
            raise self.fail(self.key(name), "must be an integer >= 1")
        return value

    def has_in_layer(self, name: str) -> bool:
        return name in self._of_layers

    def has_tensor(self, name: str) -> bool:
        return name in self.found.tensors

    def fail(self, key: str, rule: str) -> ModelError:
        return ModelError(f"{self.found.file}: `{key}` {rule}. Given: {shorten(self.found.metadata.get(key))}")


Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How to convert the metadata of one architecture.

    Attributes:
        family: Name in `architectures` of a config.json.
        numbers: Metadata key without the architecture's prefix -> key of a config.json. Keys that a file lacks are
            left out.
        fixed: Keys and values of the config.json that are the same for all models of the architecture.
        bias: Key of a config.json -> tensors of a layer. The value is true if some layer has one of these tensors.
        complete: Function that adds further keys to the config.json, or changes its values.
        rotates: Whether the model has a rotary embedding.
        rotates_a_part: Whether the rotary embedding may rotate only a part of a head.
        has_lists: Whether a file may store a list, with a number for each layer, in place of one number. `complete`
            reads these lists.
    """

    family: str
    numbers: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    bias: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    complete: Callable[[MetadataReader, Config], None] | None = None
    rotates_a_part: bool = False
    has_lists: bool = False
    rotates: bool = True
