"""The steps of a recording as one HTML file for a browser, with the style and the scripts of the page at /ui."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from pathlib import Path
from typing import Final

import msgspec
from llm_serving.errors import ConfigError
from llm_serving.server.ui import COMMON_POLICY, FOLDER

from llm_serving_tools.recordings.report import ReplayPageData

MODULES: Final = ("dom.js", "theme.js", "replay.js")
"""Scripts of the page at /ui, each after those that it imports."""
IMPORT: Final = re.compile(r"^import [^;]*;\n", re.MULTILINE)
EXPORT: Final = re.compile(r"^export ", re.MULTILINE)


def write_replay_page(story: ReplayPageData, target: Path) -> None:
    """Write recorded scheduler decisions as an HTML file. Raise ConfigError if the file cannot be written."""
    try:
        target.write_text(replay_page(story), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from None


def replay_page(story: ReplayPageData) -> str:
    """Return an HTML file that shows recorded scheduler decisions. Its texts are embedded as data, never as code."""
    style = (FOLDER / "style.css").read_text(encoding="utf-8")
    code = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in MODULES)
    code = EXPORT.sub("", IMPORT.sub("", code))
    code += "\nshowStory();\n"
    data = msgspec.json.encode(story).decode().replace("<", "\\u003c")  # so that no text closes the element
    policy = f"default-src 'none'; script-src {_hash(code)}; style-src {_hash(style)}; {COMMON_POLICY}"
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


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
