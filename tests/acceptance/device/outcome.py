"""The outcome of a part of an acceptance, and the report of all parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


class PartError(Exception):
    """A part cannot continue; the message says what to do."""


@dataclass(frozen=True)
class Outcome:
    """Attributes:
    title: Title of the part.
    lines: Results in Markdown.
    faults: Why the part failed; empty: it passed.
    """

    title: str
    lines: Sequence[str] = ()
    faults: Sequence[str] = ()

    @classmethod
    def failed(cls, title: str, fault: str) -> Self:
        return cls(title, (), (fault,))

    @property
    def verdict(self) -> str:
        return "FAILED" if self.faults else "passed"


def reason(output: str) -> str:
    """Return why a program failed: the last error in its output, without MindSpore's source locations after it."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("[WARNING]")]
    errors = [line for line in lines if re.match(r"(\w*Error|\w*Exception|error): ", line)]
    return (errors or lines or ["no output"])[-1]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    return lines + [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows]


def report(title: str, outcomes: Sequence[Outcome]) -> str:
    """Return the report in Markdown: the verdicts, then the results."""
    lines = [f"# {title}", "", *table(("part", "verdict"), [(each.title, each.verdict) for each in outcomes])]
    for each in outcomes:
        lines += ["", f"## {each.title}: {each.verdict}", ""]
        lines += [f"- **{fault}**" for fault in each.faults]
        lines += ["", *each.lines] if each.faults and each.lines else each.lines
    return "\n".join(lines) + "\n"
