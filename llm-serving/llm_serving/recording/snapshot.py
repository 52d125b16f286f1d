"""Writes a scheduler's state. A restored scheduler makes the same decisions as the original.

The state is a graph of objects, some of which are shared and compared by identity. It is written as a list of nodes,
each after the nodes to which it refers. A node has the name of its type and then its values: scalars, or `[index]` of
another node. Classes are restored without a call of their constructors.
"""

from __future__ import annotations

import enum
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, Final

from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams

Layouts = dict[str, list[str]]
"""Class -> names of its attributes, in the order of the cells."""

_SCALARS: Final = frozenset({int, float, str, bytes, bool, type(None)})
SEQUENCES: Final[dict[str, type[Any]]] = {each.__name__: each for each in (list, tuple, set, frozenset)}
MAPPINGS: Final[dict[str, type[Any]]] = {each.__name__: each for each in (dict, OrderedDict)}
_PACKAGE: Final = __name__.partition(".")[0]
_PARTS: Final = ("core", "kvcache", "scheduler")
LEFT_OUT: Final[dict[type, frozenset[str]]] = {
    Request: frozenset({"constraint", "matcher", "beam_search", "sink", "http_timings"})
}
"""Class -> attributes that do not affect decisions. They are not written, and are restored as None."""


def capture(value: object) -> tuple[Layouts, list[Any]]:
    """Encode an object and all that it refers to. Return (attribute names of each class, nodes as described above)."""
    writer = _Writer()
    writer.cell(value)
    return writer.layouts, writer.nodes


class _Writer:
    def __init__(self) -> None:
        self.layouts: Layouts = {}
        self.nodes: list[Any] = []
        self._indices: dict[object, int] = {}
        """Identity of an object, or value of a frozen set (Python may copy it) -> index of the node."""
        self._names: dict[type, str] = {}

    def cell(self, value: Any) -> Any:
        if type(value) in _SCALARS:
            return value
        key = value if type(value) is frozenset else id(value)
        index = self._indices.get(key)
        if index is None:
            node = self._node(value)  # adds the nodes it refers to
            index = self._indices[key] = len(self.nodes)
            self.nodes.append(node)
        return [index]

    def _cells(self, values: Iterable[Any]) -> list[Any]:
        values = list(values)
        # A fast path: block tables are long and contain scalars only.
        return values if _SCALARS.issuperset(map(type, values)) else [self.cell(value) for value in values]

    @staticmethod
    def _is_plain_set(value: Any) -> bool:
        """Return whether a value is a set of scalars, which is written sorted because the order of a set can vary."""
        return isinstance(value, set | frozenset) and _SCALARS.issuperset(map(type, value))

    def _node(self, value: Any) -> list[Any]:
        kind = type(value)
        name = kind.__name__
        if SEQUENCES.get(name) is kind:
            return [name, sorted(value, key=repr) if self._is_plain_set(value) else self._cells(value)]
        if MAPPINGS.get(name) is kind:
            return [name, self._cells(value.keys()), self._cells(value.values())]
        if kind is array:
            return [name, value.tolist(), value.typecode]
        if kind is SamplingParams:  # no decision depends on the other parameters
            return [name, value.max_tokens]
        name = self._names.get(kind) or self._names.setdefault(kind, _name_of(kind))
        if isinstance(value, enum.Enum):
            return [name, value.value]
        if isinstance(value, tuple):
            return [name, self._cells(value)]
        layout = self.layouts.get(name)
        if layout is None:
            layout = self.layouts[name] = _attributes(value)
        return [name, self._cells([getattr(value, attribute) for attribute in layout])]


def _name_of(kind: type) -> str:
    name = f"{kind.__module__.removeprefix(_PACKAGE + '.')}:{kind.__name__}"
    if class_of(name) is not kind:
        raise TypeError(f"{kind} cannot be part of a scheduler's state")
    return name


def class_of(name: str) -> type[Any]:
    module, _, class_name = name.partition(":")
    if module.partition(".")[0] not in _PARTS:
        raise TypeError(f"{name} cannot be part of a scheduler's state")
    kind = getattr(sys.modules[f"{_PACKAGE}.{module}"], class_name)
    if not isinstance(kind, type) or kind.__module__ != f"{_PACKAGE}.{module}":
        raise TypeError(f"{name} does not name a class of this version")
    return kind


def _attributes(value: Any) -> list[str]:
    names = declared_attributes(type(value)) or list(vars(value))
    return [name for name in names if name not in LEFT_OUT.get(type(value), ())]


def declared_attributes(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind)] if is_dataclass(kind) else list(getattr(kind, "__slots__", ()))
