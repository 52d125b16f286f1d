"""Rules for unsupported fields of request bodies. Each protocol has a table of such fields next to its schemas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A field that would change the response. A request that sets it is refused."""

    why: str = "is not supported"
    neutral: tuple[Any, ...] = ("", 0, False)
    """Values that have no effect, in addition to null and empty values."""
    empty_asks: bool = False


@dataclass(frozen=True, slots=True)
class IgnoredField:
    """A field that cannot change the response. `x-ignored-parameters` names it."""

    why: str


Rows = Mapping[str, RefusedField | IgnoredField]


@dataclass(frozen=True, slots=True)
class BodyFields:
    """Rules for the fields of one body that are not fields of its struct."""

    rows: Rows = field(default_factory=dict)
    unknown: RefusedField | IgnoredField = RefusedField("is not a parameter of this route", ())
    nested: Mapping[str, type] = field(default_factory=dict)
    """Field -> struct of the object, or of the objects in the list, that it contains."""


NEVER_NEUTRAL: Final = ()
NO_ADAPTERS: Final = RefusedField("is not supported: request an adapter by its name in `model`")
SPEED_HINT: Final = IgnoredField("only a hint for speed")
TEXT_ONLY: Final = RefusedField("is not supported: only text is")
EARLIER_RESPONSE: Final = IgnoredField("only describes an earlier response")


def named(here: str) -> RefusedField:
    """Return the rule for a field of another protocol, which this route calls `here`."""
    return RefusedField(f"is not a parameter of this route; `{here}` is", NEVER_NEUTRAL)
