"""Loading of a runner from settings: the allocated memory."""

import json
import sys
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from families import models
from llm_serving.backends import create_backend
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.device import CacheConfig, DeviceConfig, QuantConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.errors import ConfigError, KernelError
from llm_serving.executor.supervisor import load_settings
from llm_serving.lowering import mindformers
from llm_serving.models.memory import PROCESS_BYTES, num_mask_keys, working_bytes
from llm_serving.models.spec import ModelSpec
from llm_serving.worker import loading
from llm_serving.worker.loading import load_runner
from support.model_factories import TINY, tiny_spec, write_model
from support.quantized_folders import LAYOUTS, write_quantized

pytestmark = pytest.mark.mindspore

SPEC = tiny_spec()
BLOCK_BYTES = 4096  # 16 tokens: two layers, keys and values, two heads of 16 bfloat16


def settings(folder=None, max_device_memory=None, **cache):
    model = ModelConfig(model_path=folder, max_generate_length=64, decode_batch_size=100)
    device = DeviceConfig(max_device_memory=max_device_memory)
    return load_settings(ServingConfig(model=model, device=device, pa=CacheConfig(**cache)), 0)


TAKEN_BYTES = PROCESS_BYTES + working_bytes(SPEC, 2, settings().max_num_batched_tokens, 100) + 2 * SPEC.num_parameters
"""Bytes of everything except the KV cache."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, SPEC)
    (folder / "config.json").write_text(json.dumps(SPEC.config))
    return folder


@pytest.fixture
def load(folder, monkeypatch):
    """Return the cache of a runner that is not compiled, with this much memory."""
    monkeypatch.setattr(loading.ModelRunner, "warm_up", lambda runner: None)
    monkeypatch.setenv("LLM_SERVING_THREADS", "2")  # otherwise loading would set it for later tests

    def load(max_device_memory=None, **cache):
        runner, _ = load_runner(settings(folder, max_device_memory, **cache), lambda text: None)
        return runner.kv_tensors

    return load


def test_the_guarantee_is_logged_at_start(load, caplog):
    caplog.set_level("INFO")
    load(num_blocks=1)
    assert "device_config.exactness: exact: the same request gets the same bytes" in caplog.text


def test_there_is_no_host_pool_by_default(load):
    tensors = load(num_blocks=9)
    assert (tensors.num_blocks, tensors.num_swap_blocks) == (9, 0)


def test_the_host_pool_is_as_large_as_configured(load):
    tensors = load(num_blocks=9, num_swap_blocks=5)
    assert (tensors.num_blocks, tensors.num_swap_blocks) == (9, 5)
    assert {host.shape for hosts in tensors.host_layers for host in hosts} == {(5, 16, 2, 16)}


def test_the_host_pool_reduces_the_cache(load, monkeypatch):
    free = 2 * (TAKEN_BYTES + 20 * BLOCK_BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    assert load().num_blocks == 20
    assert load(num_swap_blocks=6).num_blocks == 14


def test_the_cache_uses_the_memory_left_by_the_limit(load):
    assert load(max_device_memory=TAKEN_BYTES + 20 * BLOCK_BYTES + 1).num_blocks == 20
    with pytest.raises(ConfigError, match="must have room for one block of 4096 bytes"):
        load(max_device_memory=TAKEN_BYTES)


def test_a_draft_model_with_states_is_refused(folder, tmp_path):
    models.write("lfm2", tmp_path)
    given = msgspec.structs.replace(settings(folder, None), draft_model_path=tmp_path)
    with pytest.raises(ConfigError, match=r"must name a model without recurrent states\. Given: Lfm2ForCausalLM"):
        loading._draft_model(given, tmp_path, None, None, lambda text: None)


LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def blocks_of_llama(folder, monkeypatch, free, limit):
    """Return the blocks of Llama-2-7B in float16 for 128 requests, and the bytes of the cache and with weights."""
    (folder / "config.json").write_text(json.dumps(LLAMA_2_7B))
    monkeypatch.setattr(loading, "free_npu_memory", lambda: free)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: pytest.fail("the host's memory says nothing of an NPU's"))
    model = ModelConfig(model_path=folder, model_dtype="float16", decode_batch_size=128)
    device = DeviceConfig(device_target="Ascend", max_device_memory=limit)
    given = load_settings(ServingConfig(model=model, device=device, pa=CacheConfig(block_size=32)), 0)
    spec = ModelSpec.from_folder(folder)
    found = loading._num_blocks(given, spec, create_backend("ascend", "float16"))
    return found, found * 32 * spec.kv_bytes_per_token(2) + 2 * spec.num_parameters


@pytest.mark.parametrize(
    ("free", "max_device_memory", "num_blocks"),
    [
        (29, None, 788),
        (61, None, 2631),
        (61, 40, 1677),
        (29, 58, 909),  # an older YAML for a larger device
    ],
)
def test_the_cache_of_llama_2_7b_fits_into_the_memory_of_the_npu(
    tmp_path, monkeypatch, free, max_device_memory, num_blocks
):
    limit = None if max_device_memory is None else max_device_memory * 2**30
    found, held = blocks_of_llama(tmp_path, monkeypatch, free * 2**30, limit)
    assert found == num_blocks
    assert held < min(free, max_device_memory or free) * 2**30


@pytest.mark.parametrize(("limit", "num_blocks"), [(None, None), (40 * 2**30, 1677)])
def test_a_device_that_reports_no_free_memory_needs_a_limit(tmp_path, monkeypatch, limit, num_blocks):
    if num_blocks is not None:
        assert blocks_of_llama(tmp_path, monkeypatch, 0, limit)[0] == num_blocks
        return
    with pytest.raises(ConfigError, match=r"`device_config\.max_device_memory` must be given: the device does not"):
        blocks_of_llama(tmp_path, monkeypatch, 0, limit)


def test_the_mask_of_a_long_context_reduces_the_cache():
    short, long = (working_bytes(SPEC, 2, 2048, 1, num_mask_keys("Ascend", size)) for size in (2**10, 2**17))
    assert long - short == 2048 * (2**17 - 2**10) * 11
    assert num_mask_keys("CPU", 2**17) == 0


def test_drawing_tokens_on_an_npu_reduces_the_cache():
    rows = [working_bytes(SPEC, 2, 2048, count, num_keys) for num_keys in (0, 1) for count in (1, 129)]
    assert (rows[3] - rows[2]) - (rows[1] - rows[0]) == 128 * 13 * 4 * SPEC.vocab_size


def test_larger_steps_and_weights_reduce_the_cache():
    gate_up_and_their_product, row = 3 * 96, 4 * 3 * SPEC.vocab_size
    assert working_bytes(SPEC, 2, 2048, 100) == 2048 * 2 * 2 * gate_up_and_their_product + (100 + 2048) * row
    large = tiny_spec(vocab_size=2**16)
    assert working_bytes(large, 2, 2048, 1) == 2048 * 2 * 2 * gate_up_and_their_product + 4 * 3 * 2**16 + 3 * 2**25
    wide = tiny_spec(hidden_size=4096, intermediate_size=11008)
    assert working_bytes(wide, 2, 1, 1) == 2 * (2 * 4096 * 2 * 11008)


def test_quantised_weights_are_served_in_the_model_dtype_and_the_log_says_so(tmp_path, monkeypatch, caplog):
    write_quantized(tmp_path, LAYOUTS["GPTQ, 4 bits"], TINY)
    monkeypatch.setattr(loading.ModelRunner, "warm_up", lambda runner: None)
    monkeypatch.setenv("LLM_SERVING_THREADS", "2")
    with caplog.at_level("INFO"):
        load_runner(settings(tmp_path, num_blocks=9), lambda text: None)
    assert (
        "the stored weights are quantised by GPTQ, 4 bits, groups of 32, and kept in memory as bfloat16"
        in caplog.messages
    )
    loading_bytes = working_bytes(ModelSpec.from_folder(tmp_path), 2, 1, 1)
    # two float32 copies, the quantized values of one, and the result
    assert loading_bytes == 12 * SPEC.max_weight_elements


def test_the_log_reports_weights_that_stay_quantized(tmp_path, monkeypatch, caplog):
    write_quantized(tmp_path, LAYOUTS["FP8, a scale for a block"], TINY)
    monkeypatch.setattr(loading.ModelRunner, "warm_up", lambda runner: None)
    monkeypatch.setenv("LLM_SERVING_THREADS", "2")
    with caplog.at_level("INFO"):
        load_runner(
            msgspec.structs.replace(settings(tmp_path, num_blocks=9), quant=QuantConfig(quantization="w8a8")),
            lambda text: None,
        )
    message = "the stored weights are quantised by FP8, 8 bits, and kept in memory as w8a8, others in bfloat16"
    assert message in caplog.messages


def test_a_missing_mindformers_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "mindformers", None)
    mindformers.module_of_mindformers.cache_clear()
    with pytest.raises(
        KernelError,
        match=r"needs MindFormers 2\.1 and its dependencies, which scripts/install_mindformers\.sh installs",
    ):
        mindformers.mindformers_version()
