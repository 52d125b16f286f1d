"""Dtypes of models, conversion from and to bfloat16, and a description of a model's quantization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_serving.errors import shorten


@dataclass(frozen=True)
class ModelDtype:
    name: str
    numpy: type[np.generic]
    """Type of arrays. NumPy has no bfloat16, so its 16 bits are stored as uint16."""
    safetensors: str
    checkpoint: str
    on_ascend: bool
    aliases: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return np.dtype(self.numpy).itemsize


MODEL_DTYPES: Final[Mapping[str, ModelDtype]] = {
    dtype.name: dtype
    for dtype in (
        ModelDtype("bfloat16", np.uint16, "BF16", "BFloat16", True, ("bf16", "DataType.BFLOAT16")),
        ModelDtype("float16", np.float16, "F16", "Float16", True, ("fp16", "half", "DataType.FLOAT16")),
        ModelDtype("float32", np.float32, "F32", "Float32", False, ("fp32", "float", "DataType.FLOAT32")),
    )
}


def round_to_bfloat16(array: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even; NaN stays NaN, overflow becomes infinity."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x0040
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet_nan, rounded).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (np.asarray(bits, dtype=np.uint32) << np.uint32(16)).view(np.float32)


_METHODS: Final[Mapping[str, str]] = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 of FBGEMM",
    "modelopt": "ModelOpt",
    "aqlm": "AQLM",
    "hqq": "HQQ",
    "mxfp4": "MXFP4",
    "auto-round": "AutoRound",
    "quanto": "Quanto",
    "torchao": "torchao",
}
_BITS_OF_METHODS: Final[Mapping[str, int]] = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4}
_BITS: Final = ("bits", "w_bit", "weight_bits", "num_bits", "nbits_per_codebook")
_GROUPS: Final = ("group_size", "q_group_size")


def describe_quantization(config: Mapping[str, Any]) -> str | None:
    given = config.get("quantization_config")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return shorten(given)
    method = given.get("quant_method")
    known = method.lower() if isinstance(method, str) else ""
    parts = [_METHODS[known] if known in _METHODS else shorten(method) if method is not None else "an unnamed method"]
    weights = [row.get("weights") for row in groups_of(given)]
    sections = [given, *(each for each in weights if isinstance(each, Mapping))]
    bits = _first(sections, _BITS) or _BITS_OF_METHODS.get(known) or _bits_by_name(given)
    if bits:
        parts.append(f"{bits} bits")
    if (size := _first(sections, _GROUPS)) and size > 0:
        parts.append(f"groups of {size}")
    return ", ".join(parts)


def _first(sections: list[Mapping[str, Any]], keys: tuple[str, ...]) -> int | None:
    found = (section.get(key) for section in sections for key in keys)
    return next((each for each in found if isinstance(each, int) and not isinstance(each, bool)), None)


def _bits_by_name(given: Mapping[str, Any]) -> int | None:
    names = {"load_in_8bit": 8, "load_in_4bit": 4, "_load_in_8bit": 8, "_load_in_4bit": 4}
    return next((bits for name, bits in names.items() if given.get(name) is True), None)


def groups_of(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = given.get("config_groups")
    rows = list(groups.values()) if isinstance(groups, Mapping) else []
    return [row for row in rows if isinstance(row, Mapping)]
