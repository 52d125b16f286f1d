from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_licence_is_apache_2_and_part_of_the_package():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    project = tomllib.loads((ROOT / "llm-serving/pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert [(ROOT / "llm-serving" / name).read_text() for name in project["license-files"]] == [text]
