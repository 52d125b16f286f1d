"""Which keys of the configuration a receipt has."""

from __future__ import annotations

from dataclasses import fields

import pytest
from llm_serving.config.schema import SECTIONS, ServingConfig
from llm_serving.receipts.configuration import SETTINGS, TOLD, WITHOUT_EFFECT, settings_of, settings_told
from llm_serving.receipts.receipt import Receipt

KEYS = {f"{section}.{each.name}" for section, (_, kind) in SECTIONS.items() for each in fields(kind)}


def test_every_key_is_declared_once():
    declared = [*SETTINGS, *TOLD, *WITHOUT_EFFECT]
    assert len(declared) == len(set(declared)), "a key that is declared twice"
    assert set(declared) - KEYS == set(), "a key that is no more"
    assert KEYS - set(declared) == set(), "say in receipts/configuration.py whether these can change a byte"


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


@pytest.mark.parametrize(
    "key",
    ["model_config.pooling", "device_config.kernels", "scheduler_config.policy", "scheduler_config.turn_steps"],
)
def test_a_key_that_changes_no_byte_is_left_out(key):
    assert key not in settings_told({key: "x"})


@pytest.mark.parametrize("section", SECTIONS)
def test_a_key_that_is_not_known_is_told(section):
    assert settings_told({f"{section}.unheard_of": 1})[f"{section}.unheard_of"] == 1
