"""A recording as one file for a browser: the decisions of a scheduler, stepped through. It needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from pathlib import Path
from typing import Final

import msgspec

from llm_serving.errors import ConfigError
from llm_serving.recording.story import ToldStory
from llm_serving.server.page import FOLDER

MODULES: Final = ("dom.js", "theme.js", "replay.js")
"""Of the page at /ui, each behind those that it imports from."""
IMPORT: Final = re.compile(r"^import [^;]*;\n", re.MULTILINE)
EXPORT: Final = re.compile(r"^export ", re.MULTILINE)


def write_replay_page(story: ToldStory, target: Path) -> None:
    """Raises ConfigError where the file cannot be written."""
    try:
        target.write_text(replay_page(story), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror or error}") from None


def replay_page(story: ToldStory) -> str:
    """The whole file. Texts of the recording are data in it, and become texts on the page, never code."""
    style = (FOLDER / "style.css").read_text(encoding="utf-8")
    code = "\n".join(_without_borders((FOLDER / name).read_text(encoding="utf-8")) for name in MODULES)
    code += "\nshowStory();\n"
    data = msgspec.json.encode(story).decode().replace("<", "\\u003c")  # nothing in it ends the element it is in
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(code)}",
            f"style-src {_hash(style)}",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">
<title>{html.escape(story.name)} · replay</title>
<style>{style}</style>
</head>
<body>
<header class="top"><span class="brand">llm-serving</span><nav aria-label="Views"></nav>
<div class="tools"><button type="button" class="quiet" id="theme"></button></div></header>
<main id="main"></main>
<script type="application/json" id="story">{data}</script>
<script type="module">{code}</script>
</body>
</html>
"""


def _without_borders(module: str) -> str:
    """Its text to be put behind those of the modules that it imports from."""
    return EXPORT.sub("", IMPORT.sub("", module))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
