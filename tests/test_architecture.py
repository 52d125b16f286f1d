"""The drawing of the architecture: its packages exist, and every package is drawn."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
DRAWING = PROJECT / "docs" / "architecture.svg"
DATA = {"demo_model"}
"""Packages without code."""


def rooms_drawn() -> list[str]:
    texts = [element.text or "" for element in ET.parse(DRAWING).iter() if element.tag.endswith("}text")]
    return [text[:-1] for text in texts if re.fullmatch(r"[a-z_]+/", text)]


def test_drawing_has_the_packages_of_the_source() -> None:
    packages = {path.parent.name for path in (PROJECT / "llm-serving" / "llm_serving").glob("*/__init__.py")}
    drawn = rooms_drawn()
    assert sorted(drawn) == sorted(packages - DATA)


def test_drawing_is_small_and_linked() -> None:
    assert DRAWING.stat().st_size < 20_000
    assert "](docs/architecture.svg)" in (PROJECT / "README.md").read_text()
    assert "](../architecture.svg)" in (PROJECT / "docs" / "explanation" / "architecture.md").read_text()
