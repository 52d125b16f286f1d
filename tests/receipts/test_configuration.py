"""Which keys of the configuration a receipt has."""

from __future__ import annotations

from dataclasses import fields

import pytest
from llm_serving.config.schema import SECTIONS, ServingConfig
from llm_serving.receipts.configuration import SETTINGS, TOLD, WITHOUT_EFFECT, settings_of, settings_told
from llm_serving.receipts.receipt import Receipt

KEYS = {f"{section}.{each.name}" for section, (_, kind) in SECTIONS.items() for each in fields(kind)}


def test_every_key_is_declared_once():
    groups = [set(SETTINGS), set(TOLD), {key for key in WITHOUT_EFFECT if not key.endswith(".*")}]
    whole = {key.removesuffix(".*") for key in WITHOUT_EFFECT if key.endswith(".*")}
    named = set.union(*groups)
    assert sum(map(len, groups)) == len(named), "a key that is declared twice"
    assert named <= KEYS, "a key that is no more"
    undeclared = {key for key in KEYS - named if key.partition(".")[0] not in whole}
    assert undeclared == set(), "say in receipts/configuration.py whether these can change a byte"


def test_no_key_of_the_sections_that_compute_is_declared_with_others():
    assert {key for key in WITHOUT_EFFECT if key.endswith(".*")} == {
        "scheduler_config.*",
        "serving_config.*",
        "cluster_config.*",
    }


def test_what_another_field_tells_is_a_field():
    assert set(TOLD.values()) <= set(Receipt.__struct_fields__)


def test_what_an_answer_follows_from_is_there():
    settings = settings_of(ServingConfig())
    assert set(settings) == set(SETTINGS)
    assert settings["model_config.model_dtype"] == "bfloat16"
    assert settings["pa_config.block_size"] == 16
    assert settings["device_config.device_target"] == "CPU"


def test_a_key_that_is_newer_than_the_receipt_says_what_was_done_before_it():
    settings = settings_of(ServingConfig())
    del settings["quant_config.kv_cache_dtype"]
    assert settings_told(settings) == settings | {"quant_config.kv_cache_dtype": "auto"}


@pytest.mark.parametrize("key", ["model_config.pooling", "device_config.kernels", "scheduler_config.unheard_of"])
def test_a_key_that_changes_no_byte_is_left_out(key):
    assert key not in settings_told({key: "x"})


def test_a_key_that_is_not_known_is_told():
    assert settings_told({"quant_config.unheard_of": 1})["quant_config.unheard_of"] == 1
