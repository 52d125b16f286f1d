"""Restores a scheduler's state from the nodes that `llm_serving.recording.snapshot` writes."""

from __future__ import annotations

import enum
from array import array
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from llm_serving.core.sampling_params import SamplingParams
from llm_serving.errors import RecordingError
from llm_serving.recording.snapshot import LEFT_OUT, MAPPINGS, SEQUENCES, Layouts, class_of, declared_attributes


def restore(layouts: Layouts, nodes: list[Any]) -> Any:
    """Return the object that `capture` captured. Raise RecordingError if this version cannot read it."""
    made: list[Any] = []
    try:
        for node in nodes:
            made.append(_make(node, layouts, made))
        return made[-1]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RecordingError(f"the recorded scheduler state does not match this version: {error!r}") from None


def _make(node: list[Any], layouts: Layouts, made: list[Any]) -> Any:
    name, *parts = node
    if name == SamplingParams.__name__:
        return SamplingParams(max_tokens=parts[0])
    if name == array.__name__:
        return array(parts[1], parts[0])
    kind = SEQUENCES.get(name) or MAPPINGS.get(name) or class_of(name)
    if issubclass(kind, enum.Enum):
        return kind(parts[0])
    values, *others = ([made[cell[0]] if type(cell) is list else cell for cell in part] for part in parts)
    if name in SEQUENCES:
        return kind(values)
    if name in MAPPINGS:
        return kind(zip(values, others[0], strict=True))
    if issubclass(kind, tuple):
        return kind(*values)
    instance = object.__new__(kind)
    attributes = dict(zip(layouts[name], values, strict=True)) | dict.fromkeys(LEFT_OUT.get(kind, ()))
    attributes = _constants(kind) | attributes  # older recordings lack new fields: use their defaults
    if (declared := declared_attributes(kind)) and attributes.keys() != set(declared):
        raise ValueError(f"the recorded attributes of {name} are not those of this version")
    for attribute, value in attributes.items():
        object.__setattr__(instance, attribute, value)  # works for frozen dataclasses, too
    return instance


def _constants(kind: type[Any]) -> dict[str, Any]:
    every = fields(kind) if is_dataclass(kind) else ()
    return {field.name: field.default for field in every if field.default is not MISSING}
