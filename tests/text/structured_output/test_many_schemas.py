"""Some of the schemas of `tests/tools/grammar_cases.py`: every complete output is JSON that matches its schema."""

from __future__ import annotations

from support.schemas import fault_of, random_schema
from tools.grammar_cases import checked, random_answers


def test_random_outputs_match_their_schemas() -> None:
    counts, faults = checked(random_answers(random_schema(seed) for seed in range(20)))
    assert faults == []
    assert counts["stop"] >= 10


def test_schema_check_detects_violations() -> None:
    assert fault_of({"type": "integer"}, "1") is None
    assert fault_of({"type": "integer"}, '"1"') is not None
    assert fault_of({"type": "integer"}, "1 2") is not None
