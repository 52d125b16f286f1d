"""JavaScript functions of the web page, run in Node.js. Without Node.js the tests are skipped."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from llm_serving.server.ui import FOLDER

BROWSER = """
const stored = {"llm-serving.key": "a key in quotes \u201c\u201d"};
globalThis.document = {addEventListener() {}, baseURI: "http://127.0.0.1:8835/ui", dispatchEvent() {}};
globalThis.sessionStorage = {getItem: (name) => stored[name] ?? null};
"""

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")


@pytest.fixture
def run(tmp_path):
    """Return a function that evaluates a JavaScript expression, which may call one function of a script."""
    for path in FOLDER.glob("*.js"):
        shutil.copy(path, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def run(script, name, expression):
        (tmp_path / "browser.js").write_text(BROWSER)
        code = (
            f'import "./browser.js"; import {{ {name} }} from "./{script}"; console.log(JSON.stringify({expression}));'
        )
        (tmp_path / "main.js").write_text(code)
        done = subprocess.run(["node", "main.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_page_rounds_a_duration_to_whole_minutes(run):
    durations = "[3599e3, 7169e3, 7170e3, 36e5].map(duration)"
    assert run("dom.js", "duration", durations) == ["59 min 59 s", "1 h 59 min", "2 h 0 min", "1 h 0 min"]


def test_replay_page_shows_verified_draft_tokens_as_decoding(run):
    rows = "[[0, 2, 2, 0], [0, 4, 1, 1], [0, 4, 3, 3], [0, 4, 3, 1], [0, 4, 3, 0]]"
    phases = ["prefill", "decode", "decode", "again", "again"]
    assert run("replay.js", "phaseOfRow", f"{rows}.map((row) => phaseOfRow(row, 4))") == phases


def test_page_refuses_an_api_key_with_characters_other_than_ascii(run):
    message = 'await ask("v1/models").catch((error) => error.message)'
    assert run("api.js", "ask", message) == "an API key must consist of printable ASCII characters; enter the key again"
