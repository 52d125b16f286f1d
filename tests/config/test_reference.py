"""The generated reference: the files are up to date, every key has one text, and the YAML loads."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path

import pytest
import yaml
from llm_serving.config import load_config
from llm_serving.config.report import key_texts
from llm_serving.config.schema import OPTIONS, RULES, SECTIONS, TABLES
from llm_serving_tools.config_reference import reference_yaml

SCRIPT = Path(__file__).parents[2] / "scripts" / "write_config_reference.py"
MODULE = runpy.run_path(str(SCRIPT))
FILES = MODULE["FILES"]
TEXTS = {
    f"{section}.{key}": text
    for section, section_type in [
        *((section, section_type) for section, (_, section_type) in SECTIONS.items()),
        *((section, table.row_type) for section, table in TABLES.items()),
    ]
    for key, text in key_texts(section_type).items()
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_generated_reference_file_is_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == FILES[path](), "run .venv/bin/python scripts/write_config_reference.py"


def test_every_key_has_a_reference_text() -> None:
    rows = {f"{section}.{key}" for section, table in TABLES.items() for key in table.rules}
    assert set(TEXTS) == set(RULES) | rows


@pytest.mark.parametrize("key", TEXTS)
def test_reference_text_has_sentences_in_standard_terms(key: str) -> None:
    text = TEXTS[key]
    assert re.match(r"[A-Z0-9`]", text) and text.endswith("."), "sentences"
    assert not re.search(r"\b(whoever|nobody|somebody|guess(es|ed)?|told|tells?|None)\b", text)


def test_reference_text_of_a_number_names_its_unit() -> None:
    units = {
        "_s": r"[Ss]econds",
        "_bytes": r"bytes|KiB|size|Memory",
        "_tokens": r"tokens",
        "_steps": r"steps",
        "_blocks": r"blocks",
        "_ms_per_req": r"ms",
    }
    wrong = [
        key for key, text in TEXTS.items() for suffix, unit in units.items() if key.endswith(suffix)
        if not re.search(unit, text)
    ]  # fmt: skip
    assert wrong == []


def test_reference_yaml_has_every_key_with_its_default(tmp_path: Path) -> None:
    written = yaml.safe_load(reference_yaml())
    tables = {section: written.pop(section) for section in TABLES}
    assert {f"{section}.{key}" for section, keys in written.items() for key in keys} == set(RULES)
    assert set(tables["request_classes"]["interactive"]) == set(TABLES["request_classes"].rules)
    path = tmp_path / "reference.yaml"
    path.write_text(reference_yaml())
    config = load_config(path)
    assert dataclasses.replace(config, sources={}, origin=None) == dataclasses.replace(load_config(), sources={})


def test_expert_keys_follow_the_others_in_each_section() -> None:
    for section, keys in yaml.safe_load(reference_yaml()).items():
        if section in SECTIONS:
            experts = [OPTIONS[f"{section}.{key}"].expert for key in keys]
            assert experts == sorted(experts), section


def test_sample_api_key_row_of_the_reference_loads(tmp_path: Path) -> None:
    lines = reference_yaml().splitlines()
    begin = lines.index("#    team-a:")
    row = [line.removeprefix("#") for line in lines[begin : lines.index("api_keys: {}")]]
    path = tmp_path / "keys.yaml"
    path.write_text("\n".join(["api_keys:", *row]))
    (key,) = load_config(path).api_keys
    assert (key.name, key.highest_class, key.max_waiting) == ("team-a", None, None)
    assert list(yaml.safe_load(path.read_text())["api_keys"]["team-a"]) == list(TABLES["api_keys"].rules)


def test_reference_yaml_lines_have_at_most_120_columns() -> None:
    assert [line for line in reference_yaml().splitlines() if len(line) > 120] == []


def test_reference_document_has_every_key_once() -> None:
    document = MODULE["reference_markdown"]().partition("## Names of other servers")[0]
    names = re.findall(r"^\| `(\w+)` \|", document, re.MULTILINE)
    assert sorted(names) == sorted(key.partition(".")[2] for key in TEXTS)
