"""Write configs/serving.yaml and docs/reference/yaml_keys.md: `.venv/bin/python scripts/write_config_reference.py`.

Both are generated from the docstrings of the configuration's dataclasses, the only description of a key.
"""

from __future__ import annotations

from pathlib import Path

from llm_serving.config.report import reference_markdown, reference_yaml

ROOT = Path(__file__).parents[1]
FILES = {
    ROOT / "configs" / "serving.yaml": reference_yaml,
    ROOT / "docs" / "reference" / "yaml_keys.md": reference_markdown,
}
"""File -> function that returns its content."""


def main() -> None:
    for path, content in FILES.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content(), encoding="utf-8")


if __name__ == "__main__":
    main()
