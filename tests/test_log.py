"""One line an event, whatever is told of it."""

from __future__ import annotations

import logging
import sys

import pytest
from llm_serving.log import OneLine


def printed(text: str, error: BaseException | None = None) -> str:
    trace = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("llm_serving.x", logging.INFO, "x.py", 1, "of %s", (text,), trace)
    return OneLine("%(levelname)s %(name)s: %(message)s").format(record)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ann\n2026-01-01 ERROR [master] x: lost", r"ann\n2026-01-01 ERROR [master] x: lost"),
        ("a\r\x1b[2J\x9b1m\u2028b\x85", r"a\r\x1b[2J\x9b1m\u2028b\x85"),
        ("\ud800", r"\ud800"),
        ("Zürich 東京 😀 \\n", "Zürich 東京 😀 \\n"),
    ],
)
def test_what_a_client_or_a_file_has_put_into_a_text_is_one_line(text, shown):
    assert printed(text) == f"INFO llm_serving.x: of {shown}"


def test_a_traceback_keeps_its_lines():
    try:
        raise ValueError("why")
    except ValueError:
        lines = printed("it", sys.exc_info()[1]).split("\n")
    assert (lines[0], lines[1]) == ("INFO llm_serving.x: of it", "Traceback (most recent call last):")
    assert lines[-1] == "ValueError: why"
