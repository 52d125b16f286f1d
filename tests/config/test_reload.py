"""Reloadable keys, and refusals of all others."""

from __future__ import annotations

from pathlib import Path

import pytest
from llm_serving.config import ServingConfig, load_config
from llm_serving.config.reload import LOADED_FOR, RELOADABLE, check_reload, read_again
from llm_serving.config.schema import RULES
from llm_serving.errors import ConfigError

KEY = "key_sha256: " + "a" * 64


def config(*overrides: str) -> ServingConfig:
    return load_config(None, overrides)


def test_reload_changes_contain_both_values() -> None:
    before = config("scheduler_config.max_waiting_queue=5")
    after = config(
        "scheduler_config.max_waiting_queue=7",
        "scheduler_config.policy=mixed",
        "request_classes.batch.weight=3",
        "request_classes.standard.ttft_slo_s=null",
    )
    assert [str(each) for each in check_reload(before, before, after)] == [
        "scheduler_config.policy: prefill_first -> mixed",
        "scheduler_config.max_waiting_queue: 5 -> 7",
        "request_classes.standard.ttft_slo_s: 5.0 -> null",
        "request_classes.batch.weight: 1 -> 3",
    ]
    assert not check_reload(before, before, before)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pa_config.block_size=32", "only a restart changes pa_config.block_size: 16 -> 32; nothing is changed"),
        ("serving_config.server_port=1", "only a restart changes serving_config.server_port: 8835 -> 1"),
        ("request_classes.batch.rank=5", "only a restart changes request_classes.batch.rank: 1 -> 5"),
        ("request_classes.more.rank=5", "only a restart changes request_classes.more: null -> given, request_classes."),
        ("scheduler_config.policy=fcfs", "--set: `scheduler_config.policy` must not change from or to fcfs"),
        ("scheduler_config.max_prefill_tokens=4096", "`scheduler_config.max_prefill_tokens` must be at most 512"),
        ("model_config.decode_batch_size=33", "--set: `model_config.decode_batch_size` must be at most 32, for which"),
        (f"api_keys.me.{KEY.replace(': ', '=')}", "`api_keys` cannot become empty or non-empty by a reload"),
    ],
)
def test_reload_refuses_fixed_keys_by_name(override: str, message: str) -> None:
    before = config("scheduler_config.max_prefill_tokens=512", "model_config.decode_batch_size=32")
    after = config(
        "scheduler_config.max_prefill_tokens=512",
        "model_config.decode_batch_size=32",
        "scheduler_config.max_waiting_queue=7",
        override,
    )
    with pytest.raises(ConfigError) as caught:
        check_reload(before, before, after)
    assert message in str(caught.value)


def test_reload_may_raise_a_lowered_limit_to_its_value_at_start() -> None:
    started, lowered = config("model_config.decode_batch_size=32"), config("model_config.decode_batch_size=8")
    assert check_reload(started, lowered, started)


def test_reload_updates_the_longest_prompt_with_max_waiting_tokens() -> None:
    before, after = (load_config(None, [f"scheduler_config.max_waiting_tokens={most}"], "demo") for most in (500, 600))
    assert (before.model.max_input_len, after.model.max_input_len) == (500, 600)
    assert [str(each) for each in check_reload(before, before, after)] == [
        "model_config.seq_length: (500,) -> (600,)",
        "scheduler_config.max_waiting_tokens: 500 -> 600",
    ]


def test_reload_adds_and_removes_api_keys_without_showing_hashes() -> None:
    hashes = [digit * 64 for digit in "abc"]
    before = config(f"api_keys.a.key_sha256='{hashes[0]}'", f"api_keys.b.key_sha256='{hashes[1]}'")
    after = config(f"api_keys.a.key_sha256='{hashes[2]}'", "api_keys.a.max_requests_per_minute=3")
    changes = [str(each) for each in check_reload(before, before, after)]
    assert "api_keys.a.key_sha256" in changes and "api_keys.a.max_requests_per_minute: null -> 3" in changes
    assert "api_keys.b: given -> null" in changes
    assert not any(each in line for each in hashes for line in changes)


def test_read_again_applies_file_changes_and_keeps_flags(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("scheduler_config: {max_waiting_queue: 5, quantum_steps: 8}")
    running = load_config(path, ["scheduler_config.quantum_steps=9"])
    path.write_text("scheduler_config: {max_waiting_queue: 6, quantum_steps: 10}")
    read = read_again(running)
    assert (read.scheduler.max_waiting_queue, read.scheduler.quantum_steps) == (6, 9)
    path.write_text("scheduler_config: {max_waiting: 6}")
    with pytest.raises(ConfigError, match=r"my.yaml:1: unknown key `scheduler_config.max_waiting`"):
        read_again(running)
    with pytest.raises(ConfigError, match="started without --config"):
        read_again(config())


@pytest.mark.parametrize("folder", [True, False])
def test_reload_refuses_a_path_that_is_no_longer_a_file(tmp_path: Path, folder: bool) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("{}")
    running = load_config(path, [])
    path.unlink()
    if folder:
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    with pytest.raises(ConfigError, match=r"my\.yaml: must be a regular file to be read again"):
        read_again(running)


def test_reloadable_keys_exist() -> None:
    assert set(RULES) >= RELOADABLE
    assert set(LOADED_FOR) <= RELOADABLE
