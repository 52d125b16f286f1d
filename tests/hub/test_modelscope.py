"""Models of ModelScope: its cache, older cache layouts, downloads and errors."""

import pytest
from llm_serving import hub as hub_package
from llm_serving.errors import ModelError
from modelscope_hub import _download_control
from support.hub_server import StoredModel

from .conftest import tiny_files


def get(name: str = "Tiny/Llama", **options: str) -> hub_package.HubModel:
    model = hub_package.locate(name, "modelscope", **options)
    hub_package.download(model, lambda text: None)
    return model


def write_snapshot(folder, *without: str):
    folder.mkdir(parents=True)
    for name, content in tiny_files().items():
        if "/" not in name and name not in without:
            (folder / name).write_bytes(content)
    return folder


def test_modelscope_download_is_cached(hub, caches):
    model = get()
    assert model.folder == caches / "ms/models/Tiny--Llama/snapshots/master"
    assert (model.folder / "model.safetensors").read_bytes() == hub.models["Tiny/Llama"].files["model.safetensors"]
    assert not {"README.md", "modeling_tiny.py", "pytorch_model.bin"} & {path.name for path in model.folder.iterdir()}
    hub.asked.clear()
    assert get().sizes is None
    assert hub_package.locate("Tiny/Llama").folder == model.folder  # whichever cache has it
    assert hub.asked == []


def test_modelscope_refuses_unsupported_families_before_weights(hub):
    hub.models["Tiny/Llama"] = StoredModel(tiny_files(architectures=["MambaForCausalLM"]))
    with pytest.raises(ModelError, match="MambaForCausalLM"):
        get()
    assert list(hub.sent) == ["config.json"]


@pytest.mark.parametrize("place", ["models/Tiny/Llama-1___5", "hub/models/Tiny/Llama-1___5", "Tiny/Llama-1___5"])
def test_modelscope_finds_folders_of_older_releases(caches, place):
    folder = write_snapshot(caches / "ms" / place)
    assert hub_package.locate("Tiny/Llama-1.5").folder == folder


def test_modelscope_resumes_a_download(hub, monkeypatch):
    def mend(control: object, seconds: float) -> None:
        hub.cut_after = None

    monkeypatch.setattr(_download_control._DownloadControl, "sleep", mend)
    hub.cut_after = 100_000
    folder = get().folder
    assert [first for first, _ in hub.sent["model.safetensors"]] == [0, 100_000]
    assert (folder / "model.safetensors").read_bytes() == hub.models["Tiny/Llama"].files["model.safetensors"]


def test_modelscope_error_names_an_unknown_model(hub):
    with pytest.raises(ModelError, match="there is no such model or revision, or it is private"):
        get("Tiny/Lama")


def test_modelscope_missing_package_error_has_the_command(hub, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "modelscope_hub", None)
    with pytest.raises(ModelError, match="pip install modelscope"):
        get()


def test_modelscope_downloads_the_pooling_of_an_embedding_model(hub):
    modules = b'[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]'
    files = tiny_files() | {"modules.json": modules, "1_Pooling/config.json": b'{"pooling_mode_lasttoken": true}'}
    hub.models["Tiny/Llama"] = StoredModel(files)
    assert (get().folder / "1_Pooling/config.json").read_bytes() == files["1_Pooling/config.json"]
    assert get().sizes is None
