"""Reading of untrusted files."""

import os

import pytest
from llm_serving.core.files import parse_json, read_regular
from llm_serving.errors import ModelError
from llm_serving.models.spec import ModelSpec
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from support.fakes import DEMO_FOLDER

DEMO_FILES = ("config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "generation_config.json")


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


@pytest.mark.parametrize("make", [pipe, device, folder])
@pytest.mark.parametrize("name", [*DEMO_FILES, "chat_template.jinja"])
def test_only_regular_files_are_opened_without_blocking(tmp_path, name, make):
    for each in DEMO_FILES:
        if each != name and (DEMO_FOLDER / each).exists():
            (tmp_path / each).symlink_to(DEMO_FOLDER / each)  # as the cache of Hugging Face has them
    make(tmp_path / name)
    with pytest.raises(ModelError, match=f"{name}: must be a regular file"):
        ModelSpec.from_folder(tmp_path)
        Tokenizer.load(tmp_path)
        Tokenizer.load(tmp_path, tmp_path / name)  # the one that the folder does not need


def test_growing_file_is_read_only_to_the_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert read_regular(tmp_path / "file", 100) == b"x" * 100
    with pytest.raises(ModelError, match="must be at most 99 bytes"):
        read_regular(tmp_path / "file", 99)
    with pytest.raises(ModelError, match="none: cannot be read: No such file"):
        read_regular(tmp_path / "none", 99)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_json_with_a_lone_surrogate_is_refused_in_every_encoding(encoding):
    assert parse_json('{"a": "\\ud83d\\ude00 é 😀"}'.encode(encoding)) == {"a": "😀 é 😀"}
    for text in ('{"a": "\\ud800"}', '{"a": "\ud800"}'):
        with pytest.raises(ValueError, match=r"surrogates not allowed|decode"):
            parse_json(text.encode(encoding, "surrogatepass"))
