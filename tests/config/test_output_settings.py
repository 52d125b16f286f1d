"""Configuration keys that can change a byte of a response."""

from __future__ import annotations

from dataclasses import fields

from llm_serving.config.output_settings import OUTPUT_KEYS, output_settings
from llm_serving.config.schema import SECTIONS, ServingConfig
from llm_serving_receipts.receipt import Receipt
from llm_serving_receipts.unrecorded_keys import DERIVED_KEYS, NEUTRAL_KEYS

KEYS = {f"{section}.{each.name}" for section, (_, kind) in SECTIONS.items() for each in fields(kind)}


def test_every_key_is_declared_once():
    declared = [*OUTPUT_KEYS, *DERIVED_KEYS, *NEUTRAL_KEYS]
    assert len(declared) == len(set(declared)), "a key that is declared twice"
    assert set(declared) - KEYS == set(), "a key that is no more"
    assert KEYS - set(declared) == set(), "list these in output_settings.py or unrecorded_keys.py"


def test_derived_keys_name_fields_of_a_receipt():
    assert set(DERIVED_KEYS.values()) <= set(Receipt.__struct_fields__)


def test_output_settings_have_every_key_that_can_change_a_byte():
    settings = output_settings(ServingConfig())
    assert set(settings) == set(OUTPUT_KEYS)
    assert settings["model_config.model_dtype"] == "bfloat16"
    assert settings["pa_config.block_size"] == 16
    assert settings["device_config.device_target"] == "CPU"
