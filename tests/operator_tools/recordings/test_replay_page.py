"""The page of a recording: one file whose policy allows its own code and style only, with texts as data."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re

from llm_serving.server.ui import FOLDER
from llm_serving_tools.recordings.page import MODULES, replay_page
from llm_serving_tools.recordings.report import ReplayedRequest, ReplayedStep, ReplayPageData

HOSTILE = "</script><script>window.hit = 1</script><!--<img src=x onerror=hit()>"


def create_story(name: str = "replica-0") -> ReplayPageData:
    request = ReplayedRequest(name, "standard", name, 4, 8, 0.0)
    step = ReplayedStep(7, 1.5, [(0, 0, 4, True)], [(0, 1)], [], 0, [], None, "", None, (), 1)
    return ReplayPageData(name, "1.0", 8, 2048, 64, 16, [request], [step], 3)


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_replay_page_is_self_contained():
    text = replay_page(create_story())
    assert not re.search(r"<link|src=|@import|[ :]url\(|^import |^export ", text, re.MULTILINE)
    assert set(re.findall(r"https?://[\w.]+", text)) == {"http://www.w3.org"}


def test_replay_page_policy_allows_own_code_and_style_only():
    text = replay_page(create_story())
    policy = html.unescape(re.search(r'Security-Policy" content="([^"]*)"', text)[1])
    [code] = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert f"script-src {hash_of(code)}; style-src {hash_of(style)}" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy


def test_replay_page_keeps_texts_as_data():
    text = replay_page(create_story(HOSTILE))
    assert text.count("<script") == 2, "the data and the code"
    assert "<img" not in text
    [data] = re.findall(r'<script type="application/json" id="story">(.*?)</script>', text, re.DOTALL)
    page = json.loads(data)
    assert page["name"] == page["requests"][0][0] == HOSTILE
    assert page["steps"][0][:2] == [7, 1.5]


def test_replay_page_modules_follow_their_imports():
    for place, name in enumerate(MODULES):
        imported = re.findall(r'^import .* from "\./(.*)";$', (FOLDER / name).read_text(), re.MULTILINE)
        assert set(imported) <= set(MODULES[:place])
    names = [
        name
        for module in MODULES
        for name in re.findall(
            r"^(?:export )?(?:async )?(?:const|let|class|function\*?) (\w+)", (FOLDER / module).read_text(), re.M
        )
    ]
    assert len(set(names)) == len(names), "two modules have a name in common"
