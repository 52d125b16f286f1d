"""State and hashes of a model's files, and the check that all WorkAgents read the same ones."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import threading
from pathlib import Path

import llm_serving.demo_model
import pytest
from llm_serving.config.sections.model import ModelConfig
from llm_serving.errors import ModelError
from llm_serving.executor import model_files
from llm_serving.executor.model_files import ModelFiles, SameFiles, content_hashes
from llm_serving.models.weight_reader import weight_fingerprint
from llm_serving.transport.messages import Loaded

DEMO = Path(llm_serving.demo_model.__file__).parent


@pytest.fixture
def folder(tmp_path):
    for name, content in {
        "config.json": "{}",
        "model.safetensors": "weights",
        "tokenizer.model": "words",
        "tokenizer_config.json": "{}",
        "generation_config.json": "{}",
    }.items():
        (tmp_path / name).write_text(content)
    return tmp_path


def hashes(folder, tokenizer=None):
    return content_hashes(ModelFiles.of(folder, tokenizer))


def test_content_hashes_equal_those_of_sha256sum():
    command = "sha256sum config.json model.safetensors | LC_ALL=C sort | sha256sum"
    printed = subprocess.run(command, shell=True, cwd=DEMO, capture_output=True, text=True, check=True).stdout
    assert hashes(DEMO).weights == printed.split()[0]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_weights_hash_changes_with_every_weight_file(folder, name):
    before = hashes(folder)
    (folder / name).write_text("{ }")
    after = hashes(folder)
    assert (before.weights != after.weights, before.tokenizer == after.tokenizer) == (True, True)


@pytest.mark.parametrize("name", ["added_tokens.json", "special_tokens_map.json"])
def test_tokenizer_hash_changes_with_every_file_that_is_read(folder, name):
    before = hashes(folder)
    (folder / name).write_text("{}")
    after = hashes(folder)
    assert (before.weights == after.weights, before.tokenizer != after.tokenizer) == (True, True)
    (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": {}}')
    without = hashes(folder)
    (folder / name).write_text('{"<a>": 5}')
    assert hashes(folder) == without, "the config has the tokens itself"


def test_tokenizer_hash_covers_a_tokenizer_in_another_folder(folder, tmp_path):
    before = hashes(folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.model").write_text("words")
    assert hashes(folder, other).weights == before.weights
    assert hashes(folder, other).tokenizer != before.tokenizer, "there is no tokenizer_config.json"
    only = hashlib.sha256(f"{hashlib.sha256(b'words').hexdigest()}  tokenizer.model\n".encode()).hexdigest()
    assert hashes(folder, other).tokenizer == only


def test_gguf_file_is_hashed_as_weights_and_tokenizer(tmp_path, folder):
    model = tmp_path / "model.gguf"
    model.write_text("all of it")
    only = hashlib.sha256(f"{hashlib.sha256(b'all of it').hexdigest()}  model.gguf\n".encode()).hexdigest()
    assert hashes(model) == (only, only)
    assert hashes(model, folder) == (only, hashes(folder).tokenizer)


def test_tokenizer_hash_covers_the_merges(folder):
    (folder / "tokenizer.model").unlink()
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_text(name)
    before = hashes(folder)
    (folder / "merges.txt").write_text("others")
    assert hashes(folder).tokenizer != before.tokenizer


def test_content_hashes_report_progress_in_bytes(folder):
    files, num_read = ModelFiles.of(folder, None), []
    content_hashes(files, num_read.append)
    assert sum(num_read) == files.num_bytes


def test_hashing_in_a_thread_does_not_delay_the_end_of_the_process(folder, monkeypatch):
    files, threads = ModelFiles.of(folder, None), []

    def content_hashes(files):
        threads.append(threading.current_thread().daemon)
        return original(files)

    original = model_files.content_hashes
    monkeypatch.setattr(model_files, "content_hashes", content_hashes)
    assert asyncio.run(model_files.hash_in_thread(files)) == original(files)
    assert threads == [True]
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="has changed"):
        asyncio.run(model_files.hash_in_thread(files))


def test_content_hashes_refuse_a_file_changed_since_loading(folder):
    files = ModelFiles.of(folder, None)
    files.check()
    (folder / "model.safetensors").write_text("weightz!")
    with pytest.raises(ModelError, match="has changed"):
        files.check()
    with pytest.raises(ModelError, match="has changed"):
        content_hashes(files)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        files.check()


def test_weights_hash_covers_exported_graphs(folder, tmp_path_factory):
    graphs = tmp_path_factory.mktemp("graphs")
    (graphs / "rank").mkdir()
    for path in (graphs / "facts.json", graphs / "rank" / "decode.mindir", graphs.parent / "options.ini"):
        path.write_text("x")
    model = ModelConfig(model_path=folder, mindir_path=graphs, mindir_ini=graphs.parent / "options.ini")
    served = ModelFiles.served(model)
    names = [each.path.name for each in served.weights]
    assert names == ["config.json", "model.safetensors", "facts.json", "decode.mindir", "options.ini"]
    assert ModelFiles.served(ModelConfig(model_path=folder)) == ModelFiles.of(folder, None)


# --- SameFiles ------------------------------------------------------------------------------------------------------


class Agent:
    """A WorkAgent, which is on another machine if it reports a model."""

    machine = "10.0.0.3"
    is_killed = False

    def __init__(self, model: str = "") -> None:
        self.loaded = Loaded(8, 0, "", model=model)

    def kill(self) -> None:
        self.is_killed = True


@pytest.fixture
def same_files(folder: Path) -> SameFiles:
    return SameFiles(ModelConfig(model_path=folder))


def change(path: Path) -> None:
    os.utime(path, (1.0, 1.0))


def test_same_files_accepts_work_agents_with_equal_files(folder: Path, same_files: SameFiles) -> None:
    (folder / "tokenizer.json").write_text("of no WorkAgent")
    for _ in range(2):
        assert not same_files.start_checked(Agent).is_killed
        (folder / "tokenizer.json").unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_same_files_starts_no_work_agent_after_a_change(folder: Path, same_files: SameFiles, name: str) -> None:
    same_files.start_checked(Agent)
    before = (folder / name).stat()
    change(folder / name)
    with pytest.raises(
        ModelError, match=f"{name}: has changed since the first WorkAgent read it, .* restart the server"
    ):
        same_files.start_checked(lambda: pytest.fail("was started"))
    os.utime(folder / name, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not same_files.start_checked(Agent).is_killed


def test_same_files_kills_a_work_agent_that_read_during_a_change(folder: Path, same_files: SameFiles) -> None:
    agent = Agent()

    def start() -> Agent:
        change(folder / "model.safetensors")
        return agent

    with pytest.raises(ModelError, match=r"model.safetensors: has changed since it was loaded"):
        same_files.start_checked(start)
    assert agent.is_killed
    assert not same_files.start_checked(Agent).is_killed, "the first one is the first that serves"


def test_same_files_kills_a_work_agent_with_another_fingerprint(folder: Path, same_files: SameFiles) -> None:
    agents = [Agent(weight_fingerprint(folder)), Agent("of another")]
    assert not same_files.start_checked(lambda: agents[0]).is_killed
    with pytest.raises(ModelError, match=rf"{folder}: differs between 10\.0\.0\.3 and the master's machine: copy"):
        same_files.start_checked(lambda: agents[1])
    assert agents[1].is_killed


def test_same_files_reports_a_missing_model(folder: Path, same_files: SameFiles) -> None:
    same_files.start_checked(Agent)
    (folder / "model.safetensors").rename(folder / "elsewhere")
    with pytest.raises(ModelError, match="holds no"):
        same_files.start_checked(Agent)
