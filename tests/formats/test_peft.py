"""Values of adapter_config.json that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llm_serving.errors import ModelError
from llm_serving.formats.peft import read_config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_alpha": 10**400}, "`lora_alpha` must be a number from -1e+30 to 1e+30"),
        ({"lora_alpha": 1e39}, "`lora_alpha` must be a number from -1e+30 to 1e+30"),
        ({"lora_alpha": float("nan")}, "`lora_alpha` must be a number from -1e+30 to 1e+30"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "`alpha_pattern` must map names of modules to numbers from -1e+30"),
        ({"target_modules": "a{99999999999}"}, "`target_modules` must be a regular expression (the repetition"),
        (
            {"rank_pattern": {"(?i)q_proj": 4}},
            "`rank_pattern` must have only keys that are regular expressions (global",
        ),
        ({"alpha_pattern": {"a{99999999999}": 4}}, "`alpha_pattern` must have only keys that are regular expressions"),
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
