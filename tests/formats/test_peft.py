"""Values of adapter_config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from llm_serving.errors import ModelError
from llm_serving.formats.peft import read_config

REFUSED_KEYS = (
    r"([\w.]+)+!",
    "(a|aa)+b",
    ".*.*.*q_proj",
    "a{99999999999}",
    "(?i)q_proj",
    "layers.1..mlp",
    "q_proj\n",
    "",
)
KEYS = (
    "q_proj",
    "proj",
    "layers.1.self_attn.q_proj",
    r"layers\.1\.self_attn\.q_proj$",
    "^model.layers.1.self_attn.q_proj",
    "^layers.1.self_attn.q_proj",
    "^model.layers.1.*",
    "layers.1.*$",
    "^layers.1.*",
    "self_.*",
    ".*q_proj",
    ".*self_attn.*",
)
MODULES = (*(f"model.layers.{i}.self_attn.q_proj" for i in (0, 1, 10)), "model.layers.1.mlp", "q_proj", "xq_proj")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_alpha": 10**400}, "`lora_alpha` must be a number from -1e+30 to 1e+30"),
        ({"lora_alpha": 1e39}, "`lora_alpha` must be a number from -1e+30 to 1e+30"),
        ({"lora_alpha": float("nan")}, "`lora_alpha` must be a number from -1e+30 to 1e+30"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "`alpha_pattern` must map names of modules to numbers from -1e+30"),
        ({"target_modules": []}, "`target_modules` must be a list of names, a regular expression or all-linear"),
        *(({"rank_pattern": {key: 4}}, "`rank_pattern` must have names of modules as keys") for key in REFUSED_KEYS),
        *(({"alpha_pattern": {key: 4}}, "`alpha_pattern` must have names of modules as keys") for key in REFUSED_KEYS),
        ({"rank_pattern": {str(i): 4 for i in range(4097)}}, "`rank_pattern` must have at most 4096 keys"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_value_in_an_adapter_config_is_refused_with_its_field(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    config = {"peft_type": "LORA", "target_modules": ["q_proj"], **fields}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as error:
        read_config(tmp_path)
    assert f"adapter_config.json: {message}" in str(error.value)


@pytest.mark.parametrize("key", KEYS)
def test_pattern_matches_the_modules_that_peft_matches(tmp_path: Path, key: str) -> None:
    config = {"peft_type": "LORA", "target_modules": "all-linear", "r": 8, "rank_pattern": {key: 4, "q_proj": 2}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    read = read_config(tmp_path)
    for module in MODULES:
        found = [rank for each, rank in config["rank_pattern"].items() if re.match(rf"(.*\.)?({each})$", module)]
        assert read.rank_of(module) == [*found, 8][0]
