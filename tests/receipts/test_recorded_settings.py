from __future__ import annotations

import pytest
from llm_serving.config.output_settings import output_settings
from llm_serving.config.schema import SECTIONS, ServingConfig
from llm_serving_receipts.verifier import _recorded_settings


def test_missing_setting_has_the_value_from_before_the_key():
    settings = output_settings(ServingConfig())
    del settings["quant_config.kv_cache_dtype"]
    assert _recorded_settings(settings) == settings | {"quant_config.kv_cache_dtype": "auto"}


@pytest.mark.parametrize("key", ["model_config.pooling", "device_config.kernels", "scheduler_config.policy"])
def test_settings_that_change_no_byte_are_not_compared(key):
    assert key not in _recorded_settings({key: "x"})


@pytest.mark.parametrize("section", SECTIONS)
def test_unknown_setting_is_compared(section):
    assert _recorded_settings({f"{section}.unheard_of": 1})[f"{section}.unheard_of"] == 1
