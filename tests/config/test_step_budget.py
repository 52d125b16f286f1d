from __future__ import annotations

import json
from pathlib import Path

import pytest
from llm_serving.config import load_config

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
ONE_BILLION = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4}
TWO_BILLION = {**ONE_BILLION, "num_hidden_layers": 40}
SEVEN_BILLION = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}


def model(folder: Path, **sizes: int) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": 32 if sizes["hidden_size"] > 64 else 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        **sizes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def budget(folder: Path, *overrides: str, **sizes: int) -> int:
    return load_config(None, overrides, model(folder, **sizes)).scheduler.max_prefill_tokens


def test_step_budget_shrinks_with_model_size(tmp_path: Path) -> None:
    budgets = [budget(tmp_path, **sizes) for sizes in (TINY, ONE_BILLION, SEVEN_BILLION)]
    assert budgets == [512, 512, 256]
    assert budget(tmp_path, "model_config.decode_batch_size=4", **SEVEN_BILLION) == 132
    assert budget(tmp_path, **ONE_BILLION, vocab_size=128256) == 512, "a table is looked up"


def test_configured_step_budget_is_kept(tmp_path: Path) -> None:
    assert budget(tmp_path, "scheduler_config.max_prefill_tokens=2048", **ONE_BILLION) == 2048
    assert budget(tmp_path, "scheduler_config.max_prefill_tokens=null", **ONE_BILLION) == 512


def test_step_budget_on_another_device_is_the_default(tmp_path: Path) -> None:
    assert budget(tmp_path, "device_config.device_target=Ascend", **SEVEN_BILLION) == 2048


@pytest.mark.parametrize(
    ("key", "expected"),
    [("model_config.decode_batch_size", 3128), ("scheduler_config.max_long_prefill_tokens", 3000)],
)
def test_step_budget_has_room_for_running_requests_and_a_long_prompt(tmp_path: Path, key: str, expected: int) -> None:
    for folder in (None, model(tmp_path, **TINY), model(tmp_path, **SEVEN_BILLION)):
        config = load_config(None, [f"{key}=3000"], folder)
        assert config.scheduler.max_prefill_tokens == expected
        assert config.sources["scheduler_config.max_prefill_tokens"] == key


def test_step_budget_has_its_source(tmp_path: Path) -> None:
    key = "scheduler_config.max_prefill_tokens"
    for sizes, source in ((TINY, "device_config.device_target"), (TWO_BILLION, "size of the model")):
        assert load_config(None, (), model(tmp_path, **sizes)).sources[key] == source


@pytest.mark.parametrize(
    ("overrides", "gap"),
    [
        ((), 1),
        (("scheduler_config.enable_mixed_chunk=False",), 4),
        (("scheduler_config.enable_mixed_chunk=False", "scheduler_config.max_consecutive_prefill_steps=2"), 2),
        (("scheduler_config.max_consecutive_prefill_steps=8",), 8),
    ],
)
def test_max_consecutive_prefill_steps_depends_on_mixed_steps(
    overrides: tuple[str, ...], gap: int, tmp_path: Path
) -> None:
    config = load_config(None, overrides, model(tmp_path, **TINY))
    assert config.scheduler.max_consecutive_prefill_steps == gap
