"""The generated pages of docs/reference/ agree with the code."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "write_reference_docs.py"
FILES = runpy.run_path(str(SCRIPT))["FILES"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_generated_page_agrees_with_the_code(path: Path) -> None:
    assert path.read_text() == FILES[path](), "run .venv/bin/python scripts/write_reference_docs.py"
