"""The order of the tests, by file: what needs the operator library comes late, since it may be compiling meanwhile."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LATE = (
    *("end_to_end", "kernels", "models", "backends", "worker", "layers"),
    *("test_offline.py", "test_work_agent.py", "test_launcher.py"),
    *("engine/test_choices_on_a_model.py", "executor/test_supervisor.py"),
)
"""Longest first, so that processes that share the files end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: lateness(item.path))


def lateness(path: Path) -> int:
    """Place in `LATE`, from 1 on; 0 for all others."""
    return next((place for place, late in enumerate(LATE, start=1) if path.is_relative_to(TESTS / late)), 0)
