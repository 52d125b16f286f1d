"""Names and paths of models: an existing path takes precedence, and a folder is served without network access."""

import socket
from pathlib import Path

import pytest
from llm_serving import hub as hub_package
from llm_serving.cli.main import main
from llm_serving.config import load_config
from llm_serving.config.paths import DEMO_FOLDER
from llm_serving.errors import ConfigError, ModelError
from llm_serving.hub.huggingface import huggingface_cache
from llm_serving.hub.modelscope import modelscope_cache

from .conftest import tiny_files, weight_requests


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("somebody asks the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def write_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(tiny_files()["config.json"])
    return folder


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "a/b", "01-ai/Yi_1.5"])
def test_owner_and_name_is_a_model_name(tmp_path, name):
    assert hub_package.why_not_a_name(name, [tmp_path]) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("/models/llama", "written as a path"),
        ("./Qwen/Qwen3", "written as a path"),
        ("../Qwen3", "written as a path"),
        ("~/Qwen3", "written as a path"),
        ("Qwen/Qwen3/", "written as a path"),
        ("models\\llama", "written as a path"),
        ("gpt2", "is owner/name"),
        ("a/b/c", "is owner/name"),
        ("a b/c", "is owner/name"),
        ("a/..", "is owner/name"),
        ("a--b/c", "is owner/name"),
        ("https://huggingface.co/a/b", "is owner/name"),
        ("llama/model.safetensors", "ends like a file name"),
        ("models/llama", "a folder models exists here"),
    ],
)
def test_missing_path_is_not_a_model_name(tmp_path, text, why):
    (tmp_path / "models").mkdir()
    assert why in (hub_package.why_not_a_name(text, [tmp_path]) or "")


@pytest.mark.parametrize("written", ["./Tiny/Llama", "Tiny/Llama/", "Tiny/Lla ma"])
def test_mistyped_path_does_not_use_the_hub(hub, written):
    with pytest.raises(ConfigError, match="does not exist; searched in"):
        load_config(model=written)
    assert hub.asked == []


def test_folder_takes_precedence_over_a_name(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_folder(tmp_path / "Tiny" / "Llama")
    config = load_config(model="Tiny/Llama")
    assert (config.model.model_path, config.hub_model, config.model.model_name) == (folder, None, "Llama")
    assert hub.asked == []


@pytest.mark.parametrize("model", ["demo", DEMO_FOLDER])
def test_serving_a_folder_never_touches_the_network(no_network, model, capsys):
    assert main(["config", "check", "--model", str(model)]) == 0
    assert load_config(model=model).hub_model is None


def test_network_guard_detects_use_of_the_hub(caches, no_network):
    with pytest.raises(AssertionError, match="asks the network"):
        load_config(model="Tiny/Llama")


def test_named_model_is_served_under_its_name(hub, tmp_path):
    path = tmp_path / "serving.yaml"
    path.write_text("model_config:\n    model_path: Tiny/Llama\n    model_revision: main\n")
    config = load_config(path)
    assert config.model.model_name == "Tiny/Llama"
    assert config.model.model_path == config.hub_model.folder
    assert config.notices[0].startswith(f"{path}:2: model_config.model_path: Tiny/Llama is revision 0123456789abcdef")
    assert weight_requests(hub) == []


def test_hub_error_names_key_and_source(hub):
    with pytest.raises(ConfigError, match=r"^--model: model_config.model_path: Tiny/Lama at http://"):
        load_config(model="Tiny/Lama")


@pytest.mark.parametrize("revision", ["../x", "a b", "-x", "''"])
def test_invalid_revision_is_refused(revision):
    with pytest.raises(ConfigError, match="must be a branch, a tag or a commit"):
        load_config(None, [f"model_config.model_revision={revision}"])


def test_missing_home_folder_error_names_the_variable(monkeypatch):
    def nobody(path):
        raise RuntimeError("Could not determine home directory.")

    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "MODELSCOPE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", nobody)
    with pytest.raises(ModelError, match=r"there is no home folder for ~/\.cache; set HF_HUB_CACHE"):
        huggingface_cache()
    with pytest.raises(ModelError, match=r"there is no home folder for ~/\.cache/modelscope; set MODELSCOPE_CACHE"):
        modelscope_cache()
