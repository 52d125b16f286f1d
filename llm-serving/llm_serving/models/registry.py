"""The model families by name; a family is imported when a model of it is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final

from llm_serving.core.model_spec import ModelSpec
from llm_serving.errors import ModelError
from llm_serving.models.base import ModelFamily

MODEL_FAMILIES: Final[Mapping[str, tuple[str, str]]] = {
    "llama": ("llm_serving.models.llama_networks", "llama"),
}
"""Value of `core.model_spec.ARCHITECTURES` -> module, function."""


def model_family(spec: ModelSpec) -> ModelFamily:
    """What builds networks of this model.

    Raises:
        ModelError: No family of this name; the text lists the known ones.
    """
    if spec.family not in MODEL_FAMILIES:
        raise ModelError(f"model family {spec.family} is not known. Known: {', '.join(MODEL_FAMILIES)}")
    module, name = MODEL_FAMILIES[spec.family]
    family: ModelFamily = getattr(importlib.import_module(module), name)
    return family
