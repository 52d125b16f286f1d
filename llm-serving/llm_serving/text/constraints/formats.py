"""Formats of texts that are narrower than the compiler takes them: it has no leap years, and a second 60 in any minute.

What it leaves open is closed by a pattern beside the format, so that no answer is refused by whoever checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from llm_serving.text.constraints.schema_fault import parts_of

_LEAP_DAY: Final = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"  # not in 1900, but in 2000
)
_DATE: Final = f"(?:[0-9]{{4}}-(?:[0-9]{{2}}-(?:[01][0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|3[01]))|{_LEAP_DAY})"
_SECOND: Final = "[0-9:]{6}[0-5]"
_RULES: Final[Mapping[str, Mapping[str, Any]]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_SECOND}"},
    "date-time": {"pattern": f"^{_DATE}[tT]{_SECOND}"},
    "email": {"pattern": r"^[^@]{1,64}@[^@.]{1,63}(?:\.[^@.]{1,63})*$", "maxLength": 254},
}


def narrow_formats(schema: dict[str, Any]) -> None:
    """Adds to each part of a schema with such a format the rule that it lacks; a second time nothing."""
    parts = [schema]
    while parts:
        part = parts.pop()
        parts += [each for _, each in parts_of(part) if isinstance(each, dict)]
        name, others = part.get("format"), part.get("allOf", [])
        rule = _RULES.get(name) if isinstance(name, str) else None
        if rule is not None and isinstance(others, list) and rule not in others:
            part["allOf"] = [*others, rule]
