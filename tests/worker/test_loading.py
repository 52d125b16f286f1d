"""From settings to a runner: what is allocated."""

import dataclasses
import json
from types import SimpleNamespace

import psutil
import pytest
from llm_serving.config.schema import CacheConfig, ModelConfig, ServingConfig
from llm_serving.engine.supervisor import load_settings
from llm_serving.worker import loading
from llm_serving.worker.loading import RESERVED_BYTES, load_runner
from model_factories import tiny_spec, write_model

pytestmark = pytest.mark.mindspore

SPEC = tiny_spec()
BLOCK_BYTES = 4096  # of 16 tokens: two layers, keys and values, two heads of 16 bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, SPEC)
    config = dataclasses.asdict(SPEC) | {"architectures": [SPEC.architecture], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def load(folder, monkeypatch):
    """The cache of a runner that was not compiled."""
    monkeypatch.setattr(loading.ModelRunner, "warm_up", lambda runner: None)
    monkeypatch.setenv("LLM_SERVING_THREADS", "2")  # or loading would set it for every later test

    def load(**cache):
        model = ModelConfig(model_path=folder, max_generate_length=64, decode_batch_size=100)
        runner, _ = load_runner(
            load_settings(ServingConfig(model=model, pa=CacheConfig(**cache)), 0), lambda text: None
        )
        return runner.kv_tensors

    return load


def test_there_is_no_host_pool_by_default(load):
    tensors = load(num_blocks=9)
    assert (tensors.num_blocks, tensors.num_swap_blocks) == (9, 0)


def test_the_host_pool_is_as_large_as_configured(load):
    tensors = load(num_blocks=9, num_swap_blocks=5)
    assert (tensors.num_blocks, tensors.num_swap_blocks) == (9, 5)
    assert {host.shape for hosts in tensors.host_layers for host in hosts} == {(5, 16, 2, 16)}


def test_the_host_pool_takes_of_the_memory_the_cache_would_get(load, monkeypatch):
    free = 2 * (RESERVED_BYTES + 2 * SPEC.num_parameters + 20 * BLOCK_BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    assert load().num_blocks == 20
    assert load(num_swap_blocks=6).num_blocks == 14
