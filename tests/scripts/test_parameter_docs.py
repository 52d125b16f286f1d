import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "write_parameter_docs.py"


def test_parameter_document_equals_the_tables():
    script = runpy.run_path(str(SCRIPT))
    written = script["FILE"].read_text()
    assert written == script["document"](), "run .venv/bin/python scripts/write_parameter_docs.py"
