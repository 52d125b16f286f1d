"""Where in a JSON schema the part is that cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

MAX_TRIALS: Final = 64
_BY_NAME: Final = ("$defs", "definitions", "properties", "patternProperties")
_SCHEMAS: Final = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_SCHEMA: Final = ("items", "additionalProperties", "not")
_DEFINITIONS: Final = ("$defs", "definitions")

Path = tuple[str | int, ...]


def fault_in(schema: Any, error: str, error_of: Callable[[Any], str | None]) -> str:
    """A JSON pointer to the innermost part that has the same error alone, with the definitions of the whole beside it.

    Args:
        schema: It cannot be compiled.
        error: What is said of it.
        error_of: What is said of another schema; None: nothing.

    Returns:
        "#" for the whole.
    """
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema} if isinstance(schema, dict) else {}
    path: Path = ()
    trials = 0
    while True:
        for step, part in parts_of(schema):
            trials += 1
            if trials > MAX_TRIALS:
                return _pointer(path)
            if isinstance(part, dict) and error_of({**definitions, **part} if path or definitions else part) == error:
                path, schema = (*path, *step), part
                break
        else:
            return _pointer(path)


def parts_of(schema: Any) -> Iterator[tuple[Path, Any]]:
    if not isinstance(schema, dict):
        return
    for key in _BY_NAME:
        if isinstance(named := schema.get(key), dict):
            yield from (((key, name), part) for name, part in named.items())
    for key in _SCHEMAS:
        if isinstance(listed := schema.get(key), list):
            yield from (((key, index), part) for index, part in enumerate(listed))
    for key in _SCHEMA:
        if isinstance(part := schema.get(key), dict):
            yield (key,), part


def _pointer(path: Path) -> str:
    """As RFC 6901 writes it in a URI fragment."""
    return "#" + "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)
