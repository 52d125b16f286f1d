"""Other names of keys: former names of our own keys for one release, and names of other servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from llm_serving.config import load_config
from llm_serving.config.legacy import ALIASES, RENAMED
from llm_serving.config.paths import PROJECT_FOLDER
from llm_serving.config.schema import DEFAULTS, RULES, SECTIONS, ServingConfig
from llm_serving.errors import ConfigError

VALUES = {
    "scheduler_config.turn_steps": (9, 9),
    "scheduler_config.composition": ("separate", False),
    "scheduler_config.schedule_ahead": (False, False),
    "scheduler_config.prompt_lookup_tokens": (5, 5),
    "serving_config.join_identical": (True, True),
    "serving_config.shared_answer_bytes": ("2MB", 2**21),
    "serving_config.whole_answer_bytes": ("2MB", 2**21),
    "serving_config.grammars_kept": (3, 3),
}
"""Former name -> a value as written, and the typed one."""


def value_of(config: ServingConfig, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, SECTIONS[section][0]), name)


def test_every_renamed_key_has_an_existing_new_name() -> None:
    assert set(VALUES) == set(RENAMED)
    assert set(ALIASES.values()) <= set(RULES)
    assert not set(ALIASES) & set(RULES)


@pytest.mark.parametrize("old", RENAMED)
def test_renamed_key_is_accepted_with_one_notice(old: str, tmp_path: Path) -> None:
    (written, typed), new = VALUES[old], RENAMED[old]
    section, _, name = old.partition(".")
    path = tmp_path / "my.yaml"
    path.write_text(f"{section}:\n    {name}: {written}\n")
    for config, source in ((load_config(path), f"{path}:2"), (load_config(None, [f"{old}={written}"]), "--set")):
        assert value_of(config, new) == typed != DEFAULTS[new]
        assert config.notices == (f"{source}: {old} is now called {new}; the next release refuses the old name",)
        assert config.sources[new] == source
    assert load_config(None, [f"{new}={typed}"]).notices == ()


@pytest.mark.parametrize("old", RENAMED)
def test_renamed_key_is_in_the_table_of_renamed_names(old: str) -> None:
    (row,) = [
        line for line in (PROJECT_FOLDER / "docs" / "reference" / "renamed.md").read_text().splitlines()
        if line.startswith(f"| YAML key | `{old}")
    ]  # fmt: skip
    assert f"`{RENAMED[old]}" in row


def test_renamed_key_and_its_new_name_must_agree(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("scheduler_config:\n    quantum_steps: 4\n    turn_steps: 5\n")
    with pytest.raises(ConfigError, match=r"my.yaml:3: `scheduler_config.turn_steps` must agree with .*:2, which"):
        load_config(path)


def test_error_for_a_misspelt_key_names_the_new_key() -> None:
    with pytest.raises(ConfigError, match=r"nearest known one is `serving_config.grammar_cache_size`"):
        load_config(None, ["serving_config.grammar_cache=3"])


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("scheduler_config.max_num_seqs", "model_config.decode_batch_size", 16),
        ("scheduler_config.max_num_batched_tokens", "scheduler_config.max_prefill_tokens", 4096),
        ("model_config.max_model_len", "model_config.max_generate_length", 512),
        ("cluster_config.tensor_parallel_size", "cluster_config.tensor_parallel", 2),
        ("pa_config.enable_prefix_caching", "scheduler_config.prefix_caching", False),
    ],
)
def test_names_of_vllm_are_accepted(name: str, key: str, value: object) -> None:
    config = load_config(None, [f"{name}={value}"])
    assert (value_of(config, key), config.notices) == (value, ())
