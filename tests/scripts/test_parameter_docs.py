"""The document of parameters is what the tables of the code say."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "write_parameter_docs.py"


def test_the_document_is_what_the_tables_say():
    script = runpy.run_path(str(SCRIPT))
    written = script["FILE"].read_text()
    assert written == script["document"](), "run .venv/bin/python scripts/write_parameter_docs.py"
