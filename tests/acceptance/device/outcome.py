"""What came of one part of an acceptance, and the report of all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


class PartError(Exception):
    """A part cannot go on; its text says what is to be done."""


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        title: Of the part.
        lines: What was found, in Markdown.
        faults: Why it failed; none: it passed.
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


def reason(said: str) -> str:
    """Why a program failed, by what it said: its last error, behind which MindSpore lists its own places."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w*Error|\w*Exception|error): ", line)]
    return (errors or lines or ["no output"])[-1]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """In Markdown."""
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    return lines + [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows]


def report(title: str, outcomes: Sequence[Outcome]) -> str:
    """All of it in Markdown: the verdicts first, then what was found."""
    lines = [f"# {title}", "", *table(("part", "verdict"), [(each.title, each.verdict) for each in outcomes])]
    for each in outcomes:
        lines += ["", f"## {each.title}: {each.verdict}", ""]
        lines += [f"- **{fault}**" for fault in each.faults]
        lines += ["", *each.lines] if each.faults and each.lines else each.lines
    return "\n".join(lines) + "\n"
