"""Checks and memory of models whose layers keep fixed-size states."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from families import models
from llm_serving.config import load_config
from llm_serving.config.model_size import model_size
from llm_serving.config.schema import ServingConfig
from llm_serving.engine.replica import build_scheduler
from llm_serving.errors import ConfigError
from llm_serving.executor.supervisor import load_settings
from llm_serving.models.spec import ModelSpec
from llm_serving.network.sharding import sharded

STATE_BYTES = 3 * 2 * 64 * 4
"""Bytes of a slot: 3 convolutions, each 2 rows of 64 columns of float32."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.write("lfm2", tmp_path)
    return tmp_path


def load(folder: Path, *overrides: str) -> ServingConfig:
    return load_config(None, ["model_config.decode_batch_size=6", *overrides], folder)


def test_model_spec_describes_its_states(folder: Path) -> None:
    spec = ModelSpec.from_folder(folder)
    assert (len(spec.states), spec.state_bytes, len(spec.caches)) == (3, STATE_BYTES, 1)


def test_default_spare_state_slots_follow_the_running_requests(folder: Path) -> None:
    assert load(folder).num_state_slots(STATE_BYTES) == 6 + 8
    more = load(folder, "model_config.decode_batch_size=20")
    assert more.num_state_slots(STATE_BYTES) == 20 + 20
    assert more.num_state_slots(100_000_000) == 20 + 10, "large states have about 1 GiB of spare slots"
    assert more.num_state_slots(0) == 0
    assert load(folder, "pa_config.num_state_slots=7").num_state_slots(STATE_BYTES) == 7
    assert load_settings(load(folder, "pa_config.num_state_slots=7"), 0).pa.num_state_slots == 7


def test_too_few_state_slots_are_refused(folder: Path) -> None:
    rule = r"`pa_config\.num_state_slots` must be at least 6, the value of `model_config\.decode_batch_size`\. Given: 5"
    with pytest.raises(ConfigError, match=rule):
        load(folder, "pa_config.num_state_slots=5")


def test_state_slots_without_states_have_a_notice() -> None:
    config = load_config(None, ["pa_config.num_state_slots=5"], Path("demo"))
    notice = "num_state_slots: 5 has no effect: LlamaForCausalLM has no fixed-size states"
    assert any(notice in each for each in config.notices)


def test_reload_cannot_raise_running_requests_above_the_state_slots(folder: Path) -> None:
    scheduler = build_scheduler(load(folder), 20, num_state_slots=14)
    assert scheduler.limits.max_num_seqs == 6
    more = build_scheduler(load(folder, "model_config.decode_batch_size=9"), 20)._components.rules
    scheduler.reload(more)
    assert scheduler.limits.max_num_seqs == 6


def test_tensor_parallel_ranks_divide_states(folder: Path) -> None:
    network = ModelSpec.from_folder(folder).network
    for rank in range(2):
        part = sharded(network, rank, 2)
        assert [each.shape for each in part.states] == [(2, each.shape[1] // 2) for each in network.states]
        assert [cache.kv_heads for cache in part.caches] == [1]


def test_memory_estimates_count_states(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1_210_000_000))
    few, many = (load(folder, f"pa_config.num_state_slots={count}") for count in (10, 30_000))
    lines = model_size(few).lines
    assert any(line.split("  ")[-1].strip() == "10 slots of 0.0 MB, 0.0 MB" for line in lines)
    assert model_size(few).fits
    assert not model_size(many).fits, "46 MB of states beside 600 MB of a process"
    needed = r"`device_config\.max_device_memory` must be at least .* for the largest step, 46080000 for the states and"
    with pytest.raises(ConfigError, match=needed):
        load(folder, "pa_config.num_state_slots=30000", "device_config.max_device_memory=610MB")
