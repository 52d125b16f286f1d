"""WorkAgents of one server read the same files, or do not serve."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from llm_serving.config.sections.model import ModelConfig
from llm_serving.errors import ModelError
from llm_serving.models.weight_reader import sketch_of
from llm_serving.receipts.same_files import SameFiles
from llm_serving.transport.messages import Loaded


class Agent:
    """At another machine if it tells of a model."""

    machine = "10.0.0.3"
    is_killed = False

    def __init__(self, model: str = "") -> None:
        self.loaded = Loaded(8, 0, "", model=model)

    def kill(self) -> None:
        self.is_killed = True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.fixture
def same_files(folder: Path) -> SameFiles:
    return SameFiles(ModelConfig(model_path=folder))


def change(path: Path) -> None:
    os.utime(path, (1.0, 1.0))


def test_those_that_read_the_same_serve(folder: Path, same_files: SameFiles) -> None:
    (folder / "tokenizer.json").write_text("of no WorkAgent")
    for _ in range(2):
        assert not same_files.read_by(Agent).is_killed
        (folder / "tokenizer.json").unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_none_is_started_that_would_read_something_else(folder: Path, same_files: SameFiles, name: str) -> None:
    same_files.read_by(Agent)
    before = (folder / name).stat()
    change(folder / name)
    with pytest.raises(ModelError, match=f"{name}: is not what the first WorkAgent read, .* start the server again"):
        same_files.read_by(lambda: pytest.fail("was started"))
    os.utime(folder / name, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not same_files.read_by(Agent).is_killed


def test_one_that_reads_while_a_file_is_changed_is_ended(folder: Path, same_files: SameFiles) -> None:
    agent = Agent()

    def start() -> Agent:
        change(folder / "model.safetensors")
        return agent

    with pytest.raises(ModelError, match=r"model.safetensors: has changed since it was loaded"):
        same_files.read_by(start)
    assert agent.is_killed
    assert not same_files.read_by(Agent).is_killed, "the first one is the first that serves"


def test_one_that_reads_another_model_on_another_machine_is_ended(folder: Path, same_files: SameFiles) -> None:
    agents = [Agent(sketch_of(folder)), Agent("of another")]
    assert not same_files.read_by(lambda: agents[0]).is_killed
    with pytest.raises(
        ModelError, match=rf"{folder}: is another model at 10\.0\.0\.3 than on the master's machine: put"
    ):
        same_files.read_by(lambda: agents[1])
    assert agents[1].is_killed


def test_a_model_that_is_gone_is_nobody_s(folder: Path, same_files: SameFiles) -> None:
    same_files.read_by(Agent)
    (folder / "model.safetensors").rename(folder / "elsewhere")
    with pytest.raises(ModelError, match="holds no"):
        same_files.read_by(Agent)
