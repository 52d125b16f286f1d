"""Which keys of the configuration a receipt has."""

from __future__ import annotations

from dataclasses import fields

from llm_serving.config.schema import SECTIONS, ServingConfig
from llm_serving.receipts.configuration import COMPUTING, WITHOUT_EFFECT, settings_of


def test_every_key_of_these_sections_is_there_or_known_to_have_no_effect():
    known = {each.name for section in COMPUTING for each in fields(SECTIONS[section][1])}
    assert known >= WITHOUT_EFFECT, "a key that is no more"
    told = {key.partition(".")[2] for key in settings_of(ServingConfig())}
    assert told == known - WITHOUT_EFFECT


def test_what_an_answer_follows_from_is_there():
    settings = settings_of(ServingConfig())
    assert settings["model_config.model_dtype"] == "bfloat16"
    assert settings["pa_config.block_size"] == 16
    assert settings["device_config.device_target"] == "CPU"
