"""The types of numbers that models are computed in and stored as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np


@dataclass(frozen=True)
class ModelDtype:
    name: str
    """As configurations, MindSpore and PyTorch have it."""
    numpy: type[np.generic]
    """What an array of it has: NumPy knows no bfloat16, whose bits travel as those of a number."""
    safetensors: str
    checkpoint: str
    """Its name in MindSpore's `.ckpt` files."""
    on_ascend: bool
    """Whether the primitives of the device compute in it."""
    aliases: tuple[str, ...]
    """Other names in configurations and flags."""

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
