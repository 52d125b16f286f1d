"""The table of all models in docs/results/models.md is up to date."""

from families import models
from families.table import row, table
from llm_serving.models.gguf_architectures import ARCHITECTURES
from support.tables import PROJECT


def test_document_has_the_table_of_all_models() -> None:
    assert table() in (PROJECT / "docs" / "results" / "models.md").read_text()


def test_every_architecture_of_files_has_a_model() -> None:
    """Those of encoders have theirs in `families.encoders`."""
    named = {each.strip("` ") for name in models.names() for each in row(name)[3].split(",")}
    assert ARCHITECTURES.keys() - named == {"bert", "modern-bert"}
