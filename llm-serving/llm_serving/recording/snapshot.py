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
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Final

from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.errors import RecordingError

Layouts = dict[str, list[str]]
"""Class -> names of its attributes, in the order of the cells."""

_SCALARS: Final = frozenset({int, float, str, bytes, bool, type(None)})
_SEQUENCES: Final[dict[str, type[Any]]] = {each.__name__: each for each in (list, tuple, set, frozenset)}
_MAPPINGS: Final[dict[str, type[Any]]] = {each.__name__: each for each in (dict, OrderedDict)}
_PACKAGE: Final = __name__.partition(".")[0]
_PARTS: Final = ("core", "kvcache", "scheduler")
_LEFT_OUT: Final[dict[type, frozenset[str]]] = {
    Request: frozenset({"constraint", "matcher", "beam_search", "sink", "http_timings"})
}
"""Class -> attributes that do not affect decisions. They are not written, and are restored as None."""


def capture(value: object) -> tuple[Layouts, list[Any]]:
    """Encode an object and all that it refers to. Return (attribute names of each class, nodes as described above)."""
    writer = _Writer()
    writer.cell(value)
    return writer.layouts, writer.nodes


def restore(layouts: Layouts, nodes: list[Any]) -> Any:
    """Return the object that `capture` captured. Raise RecordingError if this version cannot read it."""
    made: list[Any] = []
    try:
        for node in nodes:
            made.append(_make(node, layouts, made))
        return made[-1]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RecordingError(f"the recorded scheduler state does not match this version: {error!r}") from None


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
        if _SEQUENCES.get(name) is kind:
            return [name, sorted(value, key=repr) if self._is_plain_set(value) else self._cells(value)]
        if _MAPPINGS.get(name) is kind:
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
    if _class_of(name) is not kind:
        raise TypeError(f"{kind} cannot be part of a scheduler's state")
    return name


def _class_of(name: str) -> type[Any]:
    module, _, class_name = name.partition(":")
    if module.partition(".")[0] not in _PARTS:
        raise TypeError(f"{name} cannot be part of a scheduler's state")
    kind = getattr(sys.modules[f"{_PACKAGE}.{module}"], class_name)
    if not isinstance(kind, type) or kind.__module__ != f"{_PACKAGE}.{module}":
        raise TypeError(f"{name} does not name a class of this version")
    return kind


def _attributes(value: Any) -> list[str]:
    names = _declared(type(value)) or list(vars(value))
    return [name for name in names if name not in _LEFT_OUT.get(type(value), ())]


def _declared(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind)] if is_dataclass(kind) else list(getattr(kind, "__slots__", ()))


def _constants(kind: type[Any]) -> dict[str, Any]:
    every = fields(kind) if is_dataclass(kind) else ()
    return {field.name: field.default for field in every if field.default is not MISSING}


def _make(node: list[Any], layouts: Layouts, made: list[Any]) -> Any:
    name, *parts = node
    if name == SamplingParams.__name__:
        return SamplingParams(max_tokens=parts[0])
    if name == array.__name__:
        return array(parts[1], parts[0])
    kind = _SEQUENCES.get(name) or _MAPPINGS.get(name) or _class_of(name)
    if issubclass(kind, enum.Enum):
        return kind(parts[0])
    values, *others = ([made[cell[0]] if type(cell) is list else cell for cell in part] for part in parts)
    if name in _SEQUENCES:
        return kind(values)
    if name in _MAPPINGS:
        return kind(zip(values, others[0], strict=True))
    if issubclass(kind, tuple):
        return kind(*values)
    instance = object.__new__(kind)
    attributes = dict(zip(layouts[name], values, strict=True)) | dict.fromkeys(_LEFT_OUT.get(kind, ()))
    attributes = _constants(kind) | attributes  # a version without a field decided as with its default
    if (declared := _declared(kind)) and attributes.keys() != set(declared):
        raise ValueError(f"the recorded attributes of {name} are not those of this version")
    for attribute, value in attributes.items():
        object.__setattr__(instance, attribute, value)  # works for frozen dataclasses, too
    return instance
