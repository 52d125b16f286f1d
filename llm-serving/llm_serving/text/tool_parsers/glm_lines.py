"""Tool calls of the first GLM-4 models: the name of a tool, a line break, and the arguments as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llm_serving.text.structured_output.grammars import literal
from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import streamed_call

OPENING: Final = "<|assistant|>"
"""Opening delimiter of the second and later calls. The first call has none."""


def _read(schemas: base.Schemas, source: base.CallSource) -> base.Reading:
    """Read one call. Only a tool name at the start distinguishes a call from text."""
    while True:
        line, found, _ = source.body.lstrip().partition("\n")
        name = line.strip()
        if found:
            break
        if not any(each.startswith(name) for each in schemas):
            raise base.NotACallError
        yield None
    if name not in schemas:
        raise base.NotACallError
    source.at = source.body.index("\n", source.body.index(name)) + 1
    yield from source.expect("{")
    yield from streamed_call(source, name)


create: Final = base.delimited([OPENING], _read, begins_open=True)


def rules(callees: Sequence[base.Callee], most: int | None, delimiters: base.Delimiters) -> str:
    """Return the grammar rules (see `base`). They allow one call, because these models write one call in an answer."""
    del most, delimiters
    names = "|".join(base.escaped(each.name) for each in callees)
    calls = base.any_call(callees, lambda i, each: f"call{i}: {literal(each.name + chr(10))} @args{i}\n")
    return f"calls: call\nfree: calls | OTHER?\nOTHER: TEXT & ~/\\s*({names})\\s*\\n(?s:.*)/\n{calls}"
