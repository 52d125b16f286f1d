"""Models of the Hugging Face hub: downloads, resumption, refusals and errors."""

import shutil

import huggingface_hub.constants
import huggingface_hub.file_download
import pytest
from llm_serving import hub as hub_package
from llm_serving.errors import ModelError
from llm_serving.hub.base import missing_files
from support.hub_server import COMMIT, StoredModel

from .conftest import WEIGHTS, tiny_files, weight_requests


def get(name: str = "Tiny/Llama", **options: str) -> hub_package.HubModel:
    model = hub_package.locate(name, **options)
    hub_package.download(model, lambda text: None)
    return model


def error_of(name: str = "Tiny/Llama", **options: str) -> str:
    with pytest.raises(ModelError) as caught:
        get(name, **options)
    return str(caught.value)


def test_huggingface_downloads_required_files_with_weights_last(hub):
    logged: list[str] = []
    model = hub_package.locate("Tiny/Llama")
    assert weight_requests(hub) == []
    assert sorted(path.name for path in model.folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert model.weight_sizes == {"model.safetensors": len(WEIGHTS)}
    hub_package.download(model, logged.append)
    assert (model.folder / "model.safetensors").read_bytes() == hub.models["Tiny/Llama"].files["model.safetensors"]
    assert list(hub.sent) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ]
    assert COMMIT in logged[0]
    assert "0.4 MB" in logged[0]


def test_huggingface_downloads_additional_templates(hub):
    downloaded, ignored = "additional_chat_templates/tool_use.jinja", "additional_chat_templates/more/x.jinja"
    hub.models["Tiny/Llama"] = StoredModel(tiny_files() | {downloaded: b"{{ messages }}", ignored: b"x"})
    folder = hub_package.locate("Tiny/Llama").folder
    assert (folder / downloaded).read_bytes() == b"{{ messages }}"
    assert not (folder / ignored).exists()


def test_huggingface_cache_has_the_standard_layout(hub, caches):
    folder = get().folder
    assert folder == caches / "hf/hub/models--Tiny--Llama/snapshots" / COMMIT
    found = huggingface_hub.snapshot_download("Tiny/Llama", cache_dir=caches / "hf/hub", local_files_only=True)
    assert found == str(folder)
    assert not list((caches / "hf/hub").rglob("*incomplete"))


def test_huggingface_cached_model_needs_no_network(hub):
    folder = get().folder
    hub.asked.clear()
    model = get()
    assert (model.folder, model.commit, model.sizes) == (folder, COMMIT, None)
    assert "nothing is downloaded" in model.source
    assert hub.asked == []


def test_huggingface_resumes_a_download(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.file_download.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.cut_after = 100_000
    assert "start again to resume" in error_of()
    assert missing_files(hub_package.locate("Tiny/Llama").folder) == ["*.safetensors"]
    kept = 100_000
    hub.cut_after = None
    before = len(hub.sent["model.safetensors"])
    folder = get().folder
    assert hub.sent["model.safetensors"][before:] == [(kept, len(WEIGHTS) - kept)]
    assert hub.num_sent("model.safetensors") == len(WEIGHTS)
    assert (folder / "model.safetensors").read_bytes() == hub.models["Tiny/Llama"].files["model.safetensors"]


def test_huggingface_retries_a_broken_connection(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10_000)

    def mend(seconds: float) -> None:
        hub.cut_after = None

    monkeypatch.setattr(huggingface_hub.file_download.time, "sleep", mend)
    hub.cut_after = 50_000
    get()
    assert hub.sent["model.safetensors"] == [(0, 50_000), (50_000, len(WEIGHTS) - 50_000)]


def test_huggingface_discards_a_damaged_file(hub):
    hub.corrupt = True
    assert "does not have the hash" in error_of()
    hub.corrupt = False
    folder = get().folder
    assert (folder / "model.safetensors").read_bytes() == hub.models["Tiny/Llama"].files["model.safetensors"]


def test_huggingface_refuses_unsupported_families_first(hub):
    hub.models["Tiny/Llama"] = StoredModel(tiny_files(architectures=["MambaForCausalLM"]))
    assert "MambaForCausalLM" in error_of()
    assert list(hub.sent) == ["config.json"]


def test_huggingface_downloads_the_shards_of_the_index(hub):
    files = tiny_files()
    files["consolidated.safetensors"] = files.pop("model.safetensors")
    files["model.safetensors.index.json"] = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    files["pytorch_model.bin.index.json"] = b"{}"
    files |= {"model-1.safetensors": b"1" * 10, "model-2.safetensors": b"2" * 20}
    hub.models["Tiny/Llama"] = StoredModel(files)
    model = get()
    assert model.weight_sizes == {"model-1.safetensors": 10, "model-2.safetensors": 20}
    assert not (model.folder / "consolidated.safetensors").exists()
    assert not (model.folder / "pytorch_model.bin.index.json").exists()
    (model.folder / "model-2.safetensors").unlink()
    hub.sent.clear()
    get()
    assert list(hub.sent) == []  # the blob is there; only its name was missing


def test_huggingface_refuses_an_invalid_index(hub):
    cases = ("model-3.safetensors", "which the hub does not have"), ("../x.safetensors", "in its own folder")
    for named, message in cases:
        files = tiny_files()
        files["model.safetensors.index.json"] = b'{"weight_map": {"a": "%s"}}' % named.encode()
        hub.models["Tiny/Llama"] = StoredModel(files, commit=COMMIT[::-1] if ".." in named else COMMIT)
        assert message in error_of()


def test_huggingface_model_without_safetensors_is_refused(hub):
    files = tiny_files()
    del files["model.safetensors"], files["original/consolidated.safetensors"]
    hub.models["Tiny/Llama"] = StoredModel(files)
    error = error_of()
    assert "has no *.safetensors but *.bin, which are not read" in error
    assert "convert" in error


def test_huggingface_gated_model_error_explains_access(hub, monkeypatch):
    hub.models["Tiny/Llama"].gated = True
    error = error_of()
    assert f"accept its conditions with an account at {hub.url}/Tiny/Llama" in error
    assert "set HF_TOKEN" in error
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "with the account of HF_TOKEN" in error_of()
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert get().folder.is_dir()


def test_huggingface_error_names_an_unknown_model_or_revision(hub):
    error = error_of("Tiny/Lama")
    assert "there is no such model, or it is private" in error
    assert f"{hub.url}/models" in error
    assert "no revision v2" in error_of(revision="v2")


def test_huggingface_revisions_have_separate_folders(hub):
    first = get().folder
    other = COMMIT[::-1]
    hub.models["Tiny/Llama"] = StoredModel(tiny_files(), commit=other, branches=("v2",))
    assert get(revision="v2").folder == first.with_name(other)
    assert get().folder == first
    assert get(revision=other).folder == first.with_name(other)


def test_huggingface_offline_uses_the_cache_only(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    error = error_of()
    assert "no local cache has it, and HF_HUB_OFFLINE forbids the download" in error
    assert hub.asked == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    folder = get().folder
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.asked.clear()
    assert get().folder == folder
    (folder / "tokenizer.json").unlink()
    assert f"{folder} lacks a tokenizer" in error_of()
    assert hub.asked == []


def test_huggingface_unreachable_hub_error_suggests_a_mirror(caches):
    error = error_of()
    assert error.startswith("Tiny/Llama at http://127.0.0.1:9 cannot be read: ")
    assert "set HF_ENDPOINT to a mirror" in error


def test_huggingface_checks_disk_space(hub, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=len(WEIGHTS) - 1)
    monkeypatch.setattr(hub_package.shutil, "disk_usage", lambda path: usage)
    assert "must have 0.4 MB free for the weights" in error_of()
    assert weight_requests(hub) == []


def test_huggingface_missing_package_error_has_the_command(hub, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in error_of()
