"""What MindFormers' networks (`model_config.implementation`) ask of the model and of other keys."""

from __future__ import annotations

from typing import Final

from llm_serving.config.values import Values
from llm_serving.core.dtypes import MODEL_DTYPES
from llm_serving.core.enums import ExactnessName, ImplementationName
from llm_serving.models.mindformers import lacking_in_llama, lacking_in_mindformers
from llm_serving.models.spec import ModelSpec

IMPLEMENTATION: Final = "model_config.implementation"
KERNELS: Final = "device_config.kernels"
DTYPE: Final = "model_config.model_dtype"
_DTYPES: Final = tuple(dtype.name for dtype in MODEL_DTYPES.values() if dtype.on_ascend)

_NEEDED: Final = (
    (KERNELS, ("auto", "primitives"), "its class is a graph of Ascend's primitives"),
    ("device_config.exactness", (ExactnessName.EXACT,), "one graph, with PagedAttention, computes all steps"),
    ("quant_config.quantization", (None,), "its products take weights in model_dtype"),
    ("quant_config.kv_cache_dtype", ("auto",), "its attention reads keys and values in model_dtype"),
    ("model_config.mindir_path", (None,), "graphs in files are the native network's"),
    (DTYPE, _DTYPES, "ApplyRotaryPosEmb, which it is made of, has no other"),
)
"""Key, the values it may have, and why."""


def check_implementation(values: Values, spec: ModelSpec | None) -> None:
    """Refuses what MindFormers' own class cannot do; `kernels: auto` becomes `primitives`, which it needs.

    Raises:
        ConfigError: A combination that cannot be served.
    """
    implementation = values[IMPLEMENTATION]
    if implementation == ImplementationName.NATIVE:
        return
    for name, allowed, why in _NEEDED:
        if values[name] not in allowed:
            told = " or ".join("null" if value is None else str(value) for value in allowed)
            raise values.error(name, f"must be {told} with {IMPLEMENTATION}: {implementation}: {why}", values[name])
    if spec is not None:
        ask = lacking_in_mindformers if implementation == ImplementationName.MINDFORMERS else lacking_in_llama
        lacks = ask(spec.architecture, spec.network, values["model_config.max_generate_length"])
        if lacks is not None:
            raise values.error(IMPLEMENTATION, f"must be native for this model: {lacks}", implementation)
    values.set(KERNELS, "primitives", values.source(KERNELS))
