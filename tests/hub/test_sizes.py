"""The memory of a model is reported before its weights are requested; a model that does not fit is not downloaded."""

import dataclasses
import json
import sys
import types

import llm_serving
import psutil
import pytest
from llm_serving.cli.arguments import stored_size
from llm_serving.cli.main import main
from llm_serving.config import load_config
from llm_serving.config.model_size import model_size
from llm_serving.errors import ConfigError
from llm_serving.models.memory import kv_cache_bytes_left
from llm_serving.models.spec import ModelSpec
from support.family_configs import config_of
from support.model_folders import write_config

from .conftest import weight_requests


@pytest.fixture(autouse=True)
def free_memory(monkeypatch):
    """The same free memory at each query, whatever else runs on the machine."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=8 * 10**9))


@pytest.fixture
def served(monkeypatch):
    """Configurations that reached `master.run`, with the weight files that existed then."""
    configs = []
    master = types.ModuleType("llm_serving.master")
    master.run = lambda config: configs.append((config, list(config.model.model_path.glob("*.safetensors")))) or 0
    monkeypatch.setitem(sys.modules, "llm_serving.master", master)
    monkeypatch.setattr(llm_serving, "master", master, raising=False)
    return configs


def lines_of(config, stored_bytes=None) -> dict[str, str]:
    lines = model_size(config, stored_bytes).lines
    return dict((part.strip() for part in line.split("  ", 1)) for line in lines)


def test_model_size_equals_the_work_agents_computation(monkeypatch):
    config = load_config(model="demo", overrides=["device_config.max_device_memory=700000000"])
    spec = ModelSpec.from_folder(config.model.model_path)
    room = kv_cache_bytes_left(
        700_000_000, spec, 2, config.scheduler.max_prefill_tokens, config.model.decode_batch_size
    )
    lines = lines_of(config, 9_000_000)
    assert lines["weights as stored"] == "9.0 MB"
    assert lines["a token of context"] == f"{spec.kv_bytes_per_token(2) / 1024:.1f} KiB"
    assert lines["fits"].startswith(f"yes: {room // spec.kv_bytes_per_token(2):,} tokens of context")
    coded = load_config(
        model="demo", overrides=["device_config.max_device_memory=700000000", "quant_config.kv_cache_dtype=int8"]
    )
    assert lines_of(coded)["a token of context"].endswith(" KiB (int8)")
    assert lines_of(coded)["fits"].startswith(f"yes: {room // spec.kv_bytes_per_token(2, int8=True):,} tokens")
    free = types.SimpleNamespace(available=1_400_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    config = load_config(model="demo")
    assert f"{room // spec.kv_bytes_per_token(2):,} tokens of context" in lines_of(config)["fits"]
    assert lines_of(config)["fits"].endswith("in 50% of 1.40 GB free here")
    free.available = 1_000_000_000
    assert not model_size(config).fits
    assert lines_of(config)["fits"].startswith("no: ")


def test_model_size_reports_reserved_cache_and_idle_resident_memory():
    config = load_config(model="demo", overrides=["device_config.max_device_memory=1GB", "pa_config.num_blocks=1000"])
    lines = lines_of(config)
    assert lines["KV cache, reserved"] == "16,000 tokens, 41.0 MB; committed as blocks are used"
    assert lines["resident when idle"] == "0.26 GB"
    config = load_config(model="demo", overrides=["device_config.max_device_memory=2GB"])
    slots, longest = config.model.decode_batch_size, config.model.max_generate_length
    assert lines_of(config)["KV cache, reserved"].startswith(f"{slots * longest:,} tokens, ")
    device = dataclasses.replace(config.device, device_target="Ascend")
    assert "committed" not in lines_of(dataclasses.replace(config, device=device))["KV cache"]
    device = dataclasses.replace(device, max_device_memory=None)
    assert not any("KV cache" in line for line in model_size(dataclasses.replace(config, device=device)).lines)


LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_model_size_reports_how_many_tokens_fit_on_an_npu(tmp_path):
    """The blocks are those of docs/getting-started/ascend.md."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    config = load_config(model="demo", overrides=["device_config.device_target=Ascend"])
    model = dataclasses.replace(
        config.model, model_path=tmp_path, model_dtype="float16", decode_batch_size=128, max_generate_length=4096
    )
    fits = lines_of(dataclasses.replace(config, model=model))["fits"]
    assert fits.startswith(f"{788 * 32:,} tokens on an NPU of 32 GB, {2631 * 32:,} tokens on an NPU of 64 GB, with 90%")


def test_model_size_checks_whether_the_configured_blocks_fit():
    for blocks, fits in ((1000, True), (10**6, False)):
        config = load_config(
            model="demo", overrides=["device_config.max_device_memory=1GB", f"pa_config.num_blocks={blocks}"]
        )
        assert model_size(config).fits is fits
    device = dataclasses.replace(config.device, device_target="Ascend", max_device_memory=None)
    assert model_size(dataclasses.replace(config, device=device)).fits


def test_serve_reports_size_before_download(hub, served, capsys):
    assert main(["serve", "--model", "Tiny/Llama"]) == 0
    ((config, weights),) = served
    assert [path.name for path in weights] == ["model.safetensors"]
    assert config.model.model_name == "Tiny/Llama"
    printed = capsys.readouterr().err
    assert (
        printed.index("weights as stored")
        < printed.index("downloading Tiny/Llama")
        < printed.index("model.safetensors: 100%")
    )
    hub.asked.clear()
    assert main(["serve", "--model", "Tiny/Llama"]) == 0
    assert hub.asked == []
    assert "nothing is downloaded" in capsys.readouterr().err


def test_model_beyond_memory_is_not_downloaded(hub, served, monkeypatch, capsys):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=10**9))
    assert main(["serve", "--model", "Tiny/Llama"]) == 2
    assert "Tiny/Llama is not downloaded, because it does not fit into memory: no: " in capsys.readouterr().err
    assert weight_requests(hub) == []
    assert served == []


def test_config_check_and_models_download_no_weights(hub, capsys):
    assert main(["config", "check", "--model", "Tiny/Llama"]) == 0
    assert "weights as stored             0.4 MB" in capsys.readouterr().out
    assert main(["models", "Tiny/Llama"]) == 0
    assert "fits  " in capsys.readouterr().out
    assert weight_requests(hub) == []


def test_models_lists_the_caches(hub, caches, capsys):
    assert main(["serve", "--model", "Tiny/Lama"]) == 2
    capsys.readouterr()
    assert main(["models"]) == 0
    assert capsys.readouterr() == ("NAME  HUB  REVISION  STATE\n", "the local caches hold no model\n")
    for hub_name in ("huggingface", "modelscope"):
        config = load_config(None, [f"model_config.model_hub={hub_name}"], "Tiny/Llama")
        llm_serving.hub.download(config.hub_model, lambda text: None)
    (config.model.model_path / "tokenizer.json").unlink()
    capsys.readouterr()
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split(maxsplit=3) == ["Tiny/Llama", "huggingface", "0123456789ab", "complete"]
    assert lines[2].split(maxsplit=3) == ["Tiny/Llama", "modelscope", "master", "incomplete, missing: a tokenizer"]
    (config.model.model_path / "model.safetensors.index.json").write_text("{")  # hides none of the others
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split(maxsplit=3)[3] == "complete"
    assert "not supported: " in lines[2]
    assert "model.safetensors.index.json must hold a JSON object with `weight_map`" in lines[2]


def test_damaged_cache_does_not_hide_another_cache(hub, monkeypatch):
    for hub_name in ("modelscope", "huggingface"):
        config = load_config(None, [f"model_config.model_hub={hub_name}"], "Tiny/Llama")
        llm_serving.hub.download(config.hub_model, lambda text: None)
    (config.model.model_path / "model.safetensors.index.json").write_text("{")
    assert load_config(model="Tiny/Llama").hub_model.hub == "modelscope"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"index\.json must hold a JSON object .*, and HF_HUB_OFFLINE forbids"):
        load_config(None, ["model_config.model_hub=huggingface"], "Tiny/Llama")


def test_duplicate_weights_count_once(tmp_path):
    folder = write_config(tmp_path / "m")
    config = load_config(model=folder)
    assert stored_size(config).lines == model_size(config, None).lines
    for name in ("model.safetensors", "consolidated.safetensors"):
        (folder / name).write_bytes(bytes(10**6))
    assert stored_size(config).lines == model_size(config, 10**6).lines


def test_model_size_counts_blocks_of_groups_of_layers(tmp_path):
    """Of 12 layers, two see all tokens: six groups of two layers, five of which hold 512 tokens and a step of 256."""
    changes = {"num_hidden_layers": 12, "sliding_window": 512, "sliding_window_pattern": 6}
    changes |= {"max_position_embeddings": 8192}
    folder = write_config(tmp_path / "model", **config_of("gemma3") | changes)
    overrides = ["device_config.max_device_memory=2GB", "scheduler_config.max_prefill_tokens=256"]
    config = load_config(model=folder, overrides=[*overrides, "pa_config.num_blocks=100"])
    lines = lines_of(config)
    assert config.model.max_generate_length == 355 * 16, "600 blocks hold 355 of all tokens and 49 of each window"
    assert lines["longest context"].endswith(" in 600 blocks of a group")
    assert lines["KV cache, reserved"].startswith("600 blocks of a group, ")
    assert lines["fits"].startswith("yes: 600 blocks of a group by pa_config.num_blocks, ")
    unlimited = lines_of(load_config(model=folder, overrides=overrides))
    assert "requests of 8,192 tokens" in unlimited["fits"]
