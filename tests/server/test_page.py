"""The page at /ui: access, headers, no external resources, and no text that becomes code."""

from __future__ import annotations

import re

import pytest
from llm_serving.config.tables import ApiKey
from llm_serving.server.middleware.authentication import hash_key
from llm_serving.server.ui import FOLDER, MEDIA_TYPES, PATH, POLICY, page_routes
from support.fakes import FakeEngine
from support.server_client import error_of, request

KEYS = (ApiKey(name="team", key_sha256=hash_key("k" * 20)),)
PATHS = [each.path for each in page_routes() if each.path != "/"]
HTML = {"accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}
SCRIPTS = sorted(FOLDER.glob("*.js"))
MAKES_CODE = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc|\beval\b"
    r"|new Function|setTimeout\([\"'`]|javascript:|\.on[a-z]+ = [\"'`]|localStorage\.setItem\(KEY"
)


def test_ui_serves_exactly_the_files_of_its_folder():
    assert {path.suffix for path in FOLDER.iterdir()} <= set(MEDIA_TYPES)
    assert sorted(PATHS) == sorted(
        PATH if path.name == "index.html" else f"{PATH}/{path.name}" for path in FOLDER.iterdir()
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("keys", [(), KEYS], ids=["without keys", "with keys"])
def test_ui_is_public_with_strict_headers(path, keys):
    answer = request(FakeEngine(api_keys=keys), "GET", path)
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["content-type"] in MEDIA_TYPES.values()


def test_ui_policy_allows_own_resources_only():
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules.pop("require-trusted-types-for") == "'script'"
    assert set(rules.values()) == {"'none'", "'self'"}
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == rules["trusted-types"] == "'none'"


@pytest.mark.parametrize("keys", [(), KEYS], ids=["without keys", "with keys"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_ui_root_redirects_browsers_to_the_page(keys, method):
    answer = request(FakeEngine(api_keys=keys), method, "/", headers=HTML)
    assert (answer.status_code, answer.headers["location"], answer.content) == (307, "ui", b"")
    assert answer.headers["vary"] == "accept"


def test_ui_root_refuses_get_of_other_clients_and_needs_a_key_for_post():
    answer = request(FakeEngine(), "GET", "/", headers={"accept": "*/*"})
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert request(FakeEngine(), "POST", "/", json={"inputs": "x"}, headers=HTML).status_code == 200
    assert request(FakeEngine(api_keys=KEYS), "POST", "/", json={"inputs": "x"}, headers=HTML).status_code == 401
    assert request(FakeEngine(limits={"ui": False}), "GET", "/", headers=HTML).status_code == 405
    assert request(FakeEngine(limits={"ui": False}, api_keys=KEYS), "GET", "/", headers=HTML).status_code == 401


def test_ui_supports_etags():
    etag = request(FakeEngine(), "GET", PATH).headers["etag"]
    again = request(FakeEngine(), "GET", PATH, headers={"if-none-match": etag})
    assert (again.status_code, again.content) == (304, b"")
    assert request(FakeEngine(), "GET", PATH, headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path", ["/ui/", "/ui/none.js", "/ui/../page.py", "/ui/%2e%2e/page.py", "/ui/index.html", "/ui//"]
)
def test_ui_opens_no_path_of_a_client(path):
    assert request(FakeEngine(), "GET", path).status_code == 404


def test_ui_path_without_file_requires_a_key():
    assert request(FakeEngine(api_keys=KEYS), "GET", "/ui/none.js").status_code == 401


@pytest.mark.parametrize("path", PATHS)
def test_ui_can_be_disabled(path):
    assert request(FakeEngine(limits={"ui": False}), "GET", path).status_code == 404
    assert request(FakeEngine(limits={"ui": False}, api_keys=KEYS), "GET", path).status_code == 401


def test_ui_has_no_external_resources():
    for path in FOLDER.iterdir():
        names = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", path.read_text())
        assert set(names) <= {"http://www.w3.org"}, path.name
        assert not re.search(r"@import|[ :]url\(", path.read_text()), path.name


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_ui_code_never_evaluates_text(path):
    assert not MAKES_CODE.findall(path.read_text())


def test_ui_index_has_no_inline_code_or_style():
    text = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=\"ui/app.js\"></script>)", text)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_ui_modules_import_existing_files(path):
    names = re.findall(r'^(?:import|export) .*from "\./(.*)";$', path.read_text(), re.MULTILINE)
    assert [name for name in names if not (FOLDER / name).is_file()] == []
    assert len(names) == len(re.findall(r"^(?:import|export) .*from ", path.read_text(), re.MULTILINE))


def test_ui_stores_the_key_in_session_storage_only():
    stored = [line for path in SCRIPTS for line in path.read_text().splitlines() if "localStorage.setItem" in line]
    assert [line.strip() for line in stored] == ["localStorage.setItem(STORED, choice);"]


def test_ui_shows_authentication_errors():
    answer = request(FakeEngine(api_keys=KEYS), "GET", "/v1/parameters")
    assert answer.status_code == 401
    assert "an API key is needed" in error_of(answer)["message"]
