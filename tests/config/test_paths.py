"""Every key that is a path has a kind, and one rule refuses other kinds."""

import dataclasses
import os
import socket
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from llm_serving.config.loader import load_config
from llm_serving.config.paths import Kind
from llm_serving.config.schema import RULES, SECTIONS
from llm_serving.errors import LLMServingError

PATHS = [
    f"{section}.{item.name}"
    for section, (_, section_type) in SECTIONS.items()
    for item in dataclasses.fields(section_type)
    if Path in (hint := get_type_hints(section_type)[item.name], *get_args(hint))
]
READ = [name for name in PATHS if RULES[name].kind in (Kind.FILE, Kind.FOLDER, Kind.FILE_OR_FOLDER)]
MADE = [name for name in PATHS if name not in READ]
OWN_WORDS = "model_config.model_path", "scheduler_config.draft_model_path"
"""Keys of models, which are checked earlier."""


def refusal(name, path):
    others = ["model_config.mindir_path=/"] if name == "model_config.mindir_ini" else []  # otherwise it is not resolved
    with pytest.raises(LLMServingError) as caught:
        load_config(None, [f"{name}={path}", *others])
    return str(caught.value)


def says(name, path, why):
    return f"--set: `{name}` must be {RULES[name].kind.value}; {why}. Given: {path}"


def test_every_path_key_has_a_kind():
    assert [name for name, rule in RULES.items() if rule.kind is not None] == PATHS
    assert len(PATHS) >= 15


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("what", ["a device", "a pipe", "a socket"])
def test_device_pipe_and_socket_are_refused(name, what, tmp_path):
    path = tmp_path / "there"
    if what == "a device":
        path = Path("/dev/zero")
    elif what == "a pipe":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    message = refusal(name, path)
    if name in OWN_WORDS:
        assert message == f"--set: {name}: {path} must be a folder in Hugging Face form, or a GGUF file"
    else:
        assert message == says(name, path, f"{what} is there")


@pytest.mark.parametrize("name", [name for name in PATHS if RULES[name].kind is not Kind.FILE_OR_FOLDER])
def test_folder_in_place_of_a_file_and_the_reverse_are_refused(name, tmp_path):
    wants_file = RULES[name].kind in (Kind.FILE, Kind.MADE_FILE, Kind.LOG)
    path = tmp_path / "there"
    if wants_file:
        path.mkdir()
    else:
        path.write_text("")
    assert refusal(name, path) == says(name, path, f"a {'folder' if wants_file else 'file'} is there")


@pytest.mark.parametrize("name", OWN_WORDS)
def test_model_folder_without_permission_is_refused(name, tmp_path, monkeypatch):
    real_stat, real_access = os.stat, os.access

    def stat(at, **options):
        if str(at) == str(tmp_path / "config.json"):
            raise PermissionError(13, "Permission denied", str(at))
        return real_stat(at, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "access", lambda at, mode: str(at) != str(tmp_path) and real_access(at, mode))
    assert refusal(name, tmp_path) == says(name, tmp_path, "it may not be read")


@pytest.mark.parametrize("name", MADE)
def test_created_path_may_use_the_home_folder(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    section, _, key = name.partition(".")
    config = load_config(None, [f"{name}=~/made"])
    assert getattr(getattr(config, SECTIONS[section][0]), key) == tmp_path / "made"
    assert "home" in refusal(name, "~nobody-of-this-name/made")


@pytest.mark.parametrize("name", PATHS)
def test_file_in_place_of_a_parent_folder_is_refused(name, tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "below"
    if name in MADE:
        assert refusal(name, path) == says(name, path, f"{tmp_path / 'file'} is no folder but a file")
    else:
        assert refusal(name, path).startswith(f"--set: {name}: {path} does not exist")


@pytest.mark.parametrize("name", PATHS)
def test_path_without_permission_to_stat_is_refused(name, tmp_path, monkeypatch):
    path, real = tmp_path / "there", os.stat

    def stat(at, *arguments, **named):
        if str(at) == str(path):
            raise PermissionError(13, "Permission denied", str(at))
        return real(at, *arguments, **named)

    monkeypatch.setattr(os, "stat", stat)
    if name in MADE:
        assert refusal(name, path) == says(name, path, "Permission denied")
    else:
        assert refusal(name, path).startswith(f"--set: {name}: {path} may not be looked at")


@pytest.mark.parametrize("name", PATHS)
def test_path_without_permission_is_refused(name, tmp_path, monkeypatch):
    kind, path = RULES[name].kind, tmp_path / "there.gguf"
    if kind in (Kind.FOLDER, Kind.MADE_FOLDER):
        path.mkdir()
    else:
        path.write_text("")
    real = os.access
    monkeypatch.setattr(os, "access", lambda at, mode: str(at) != str(path) and real(at, mode))
    assert refusal(name, path) == says(name, path, f"it may not be {'read' if name in READ else 'written'}")


@pytest.mark.parametrize("name", MADE)
def test_folder_without_permission_to_create_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda at, mode: str(at) != str(tmp_path))
    path = tmp_path / "there"
    assert refusal(name, path) == says(name, path, f"nothing may be made in {tmp_path}")


@pytest.mark.parametrize("kind", [Kind.MADE_FILE, Kind.MADE_FOLDER])
def test_created_path_may_have_missing_parents_and_links(kind, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    assert kind.broken_by(tmp_path / "link" / "a" / "b" / "c") is None


def test_log_path_needs_an_existing_folder_or_a_dash(tmp_path):
    assert Kind.LOG.broken_by(tmp_path / "log") is None
    assert Kind.LOG.broken_by(Path("-")) is None
    assert Kind.LOG.broken_by(tmp_path / "a" / "log") == f"there is no folder {tmp_path / 'a'}"
