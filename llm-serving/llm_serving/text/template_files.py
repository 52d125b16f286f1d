"""Where the chat templates of a model folder are, and which of several is taken."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from llm_serving.core.files import read_regular
from llm_serving.core.unicode import json_of
from llm_serving.errors import ModelError, shorten

TEMPLATE_FILE: Final = "chat_template.jinja"
MORE_TEMPLATES: Final = "additional_chat_templates"
"""Folder of templates beside `chat_template.jinja`, each named by its file."""
PROCESSOR_FILE: Final = "chat_template.json"
"""Of folders whose processor takes more than text: `{"chat_template": ...}`."""
DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
"""Template for conversations with tools."""
MAX_FILE_BYTES: Final = 2**22
MAX_TEMPLATES: Final = 64


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a folder by name; one alone is `default`.

    A `default` in a file of its own takes the place of all that `tokenizer_config.json` has.

    Args:
        folder: The model folder.
        config: Content of its `tokenizer_config.json`.

    Raises:
        ModelError: A file cannot be read, or holds no templates.
    """
    files = _of_files(folder)
    if DEFAULT in files:
        return files
    given = templates_of(config.get("chat_template")) | files
    if not given and (path := folder / PROCESSOR_FILE).exists():
        return _of_processor(path)
    return given


def templates_of(value: Any) -> dict[str, str]:
    """`chat_template` of a config: a text, or a list of `{"name": ..., "template": ...}`."""
    if isinstance(value, str):
        return {DEFAULT: value}
    named = value if isinstance(value, list) else []
    return {
        item["name"]: item["template"]
        for item in named
        if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
    }


def _of_files(folder: Path) -> dict[str, str]:
    paths = {DEFAULT: folder / TEMPLATE_FILE} if (folder / TEMPLATE_FILE).exists() else {}
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    if len(more) > MAX_TEMPLATES:
        raise ModelError(f"{folder / MORE_TEMPLATES}: must hold at most {MAX_TEMPLATES} templates. Given: {len(more)}")
    paths |= {path.stem: path for path in more}
    return {name: read_regular(path, MAX_FILE_BYTES).decode("utf-8", "replace") for name, path in paths.items()}


def _of_processor(path: Path) -> dict[str, str]:
    try:
        content = json_of(read_regular(path, MAX_FILE_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    templates = templates_of(content.get("chat_template") if isinstance(content, dict) else None)
    if not templates:
        raise ModelError(f"{path}: must be a JSON object with `chat_template`. Given: {shorten(content)}")
    return templates
