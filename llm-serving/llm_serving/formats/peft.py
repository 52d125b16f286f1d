"""Low-rank adapters (LoRA) in the form of PEFT: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.files import open_regular, read_json_object, read_regular
from llm_serving.errors import ModelError, shorten
from llm_serving.formats.safetensors import read_safetensors
from llm_serving.formats.stored_tensor import NUMPY_DTYPES, Array, StoredTensor, is_finite

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
MAX_CONFIG_BYTES: Final = 2**20
MAX_RANK: Final = 256
MAX_PATTERNS: Final = 4096

_LARGEST_ALPHA: Final = 1e30
_ALPHA_RANGE: Final = f" from {-_LARGEST_ALPHA:g} to {_LARGEST_ALPHA:g}"
_ALPHA_RULE: Final = "must be a number" + _ALPHA_RANGE
_PATTERN: Final = re.compile(r"(\^|\.\*)?([\w-]+(?:\\?\.[\w-]+)*)(\.\*)?\$?", re.ASCII)
"""Keys of `rank_pattern` and `alpha_pattern` that can be compared as text. Other regular expressions are refused:
matching one could take unlimited time, and `re` holds the GIL, so the whole server would stop.
"""
_PREFIX: Final = "base_model.model."
_TENSOR: Final = re.compile(r"(.+)\.lora_([AB])(\.default)?\.weight")
_NOTHING: Final[tuple[Any, ...]] = (None, False, "", [], {}, "none")
_REFUSED: Final[Mapping[str, str]] = {
    "use_dora": "must be false: DoRA scales the columns of the whole weight",
    "modules_to_save": "must be null: whole tensors of an adapter are not served",
    "bias": "must be none: biases of an adapter are not served",
    "fan_in_fan_out": "must be false: transposed weights are not served",
    "layer_replication": "must be null: replicated layers are not served",
    "lora_bias": "must be false: biases of an adapter are not served",
    "trainable_token_indices": "must be null: embeddings of an adapter are not served",
    "target_parameters": "must be null: adapters of experts are not served",
    "use_qalora": "must be false: QA-LoRA is not served",
    "megatron_config": "must be null: Megatron's layers are not served",
    "alora_invocation_tokens": "must be null: an adapter applies to all tokens",
}
"""Field of adapter_config.json whose feature is not supported -> rule that the error states."""


@dataclass(frozen=True)
class AdapterConfig:
    """Fields of adapter_config.json that this server uses.

    The keys of `rank_pattern` and `alpha_pattern` are plain text. A key matches a module if it is a part of the text
    `^.MODULE$`: the key `q_proj` of the file becomes `.q_proj$`, and `^model.layers.1.*` becomes `^.model.layers.1`.
    """

    path: Path
    rank: int
    alpha: float
    use_rslora: bool
    targets: tuple[str, ...]
    """Module names. Empty if the file selects modules in another way, such as by a regular expression."""
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @property
    def max_rank(self) -> int:
        return max((self.rank, *self.rank_pattern.values()))

    def rank_of(self, module: str) -> int:
        return int(_of_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return lora_alpha / r, or lora_alpha / sqrt(r) with `use_rslora` (Kalajdzievski 2023)."""
        rank = self.rank_of(module)
        return _of_pattern(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_module(self, module: str) -> bool:
        return any(module == each or module.endswith(f".{each}") for each in self.targets)


@dataclass(frozen=True)
class LowRankChange:
    """The change `scale * b @ a` of one tensor: a [rank, columns] and b [rows, rank], as stored."""

    a: Array
    b: Array
    scale: float


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter in memory. `modules` maps the name of a changed weight, without `.weight`, to its change."""

    folder: Path
    config: AdapterConfig
    modules: Mapping[str, LowRankChange]
    fingerprint: str


def read_adapter(folder: Path) -> PeftAdapter:
    """Read an adapter and compute its fingerprint. Raise ModelError if it is damaged or has unsupported features."""
    config = read_config(folder)
    path = folder / WEIGHTS_NAME
    if not path.exists():
        raise ModelError(f"{folder}: an adapter must have {WEIGHTS_NAME} beside {CONFIG_NAME}")
    stored = read_safetensors(path)
    with open_regular(path) as file:
        data = np.fromfile(file, np.uint8)
    found: dict[str, dict[str, Array]] = {}
    for name, tensor in stored.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            rule = "must be lora_A.weight or lora_B.weight of a linear layer"
            raise ModelError(f"{path}: tensor {shorten(name)} {rule}")
        found.setdefault(match[1].removeprefix(_PREFIX), {})[match[2]] = _array(path, data, tensor)
    modules: dict[str, LowRankChange] = {}
    for module, pair in found.items():
        if len(pair) < 2:
            raise ModelError(f"{path}: {module} must have lora_A and lora_B. Found: lora_{next(iter(pair))}")
        rank = config.rank_of(module)
        for part, axis in (("A", 0), ("B", 1)):
            shape = pair[part].shape
            if len(shape) != 2 or shape[axis] != rank:
                rule = f"must have {rank} {'rows' if axis == 0 else 'columns'}, the rank in {CONFIG_NAME}"
                raise ModelError(f"{path}: {module}.lora_{part}.weight {rule}. Found: shape {list(shape)}")
            if not is_finite(pair[part]):
                raise ModelError(f"{path}: {module}.lora_{part}.weight must hold finite numbers only")
        modules[module] = LowRankChange(pair["A"], pair["B"], config.scale_of(module))
    if not modules:
        raise ModelError(f"{path}: must have at least one pair of matrices, lora_A and lora_B")
    digest = hashlib.sha256(read_regular(config.path, MAX_CONFIG_BYTES))
    digest.update(data.data)
    return PeftAdapter(folder, config, modules, digest.hexdigest())


def _array(path: Path, data: NDArray[np.uint8], tensor: StoredTensor) -> Array:
    ((start, num_bytes),) = tensor.pieces
    if start + num_bytes > len(data):
        raise ModelError(f"{path}: must not change while it is read")
    return data[start : start + num_bytes].view(NUMPY_DTYPES[tensor.dtype]).reshape(tensor.shape)


def read_config(folder: Path) -> AdapterConfig:
    path = folder / CONFIG_NAME
    if not path.exists():
        raise ModelError(f"{folder}: must be a folder in PEFT's format, with {CONFIG_NAME}")
    fields = read_json_object(path, MAX_CONFIG_BYTES)

    def fail(field: str, rule: str) -> ModelError:
        return ModelError(f"{path}: `{field}` {rule}. Given: {shorten(fields.get(field))}")

    if fields.get("peft_type") != "LORA":
        raise fail("peft_type", "must be LORA")
    for field, rule in _REFUSED.items():
        if fields.get(field) not in _NOTHING:
            raise fail(field, rule)
    rank = fields.get("r", 8)
    if not _is_rank(rank):
        raise fail("r", f"must be an integer from 1 to {MAX_RANK}")
    alpha = fields.get("lora_alpha", 8)
    if not _is_number(alpha):
        raise fail("lora_alpha", _ALPHA_RULE)
    targets = fields.get("target_modules")
    if isinstance(targets, list) and targets and all(isinstance(each, str) for each in targets):
        targets = tuple(targets)
    elif not isinstance(targets, str):
        raise fail("target_modules", "must be a list of names, a regular expression or all-linear")
    is_partial = any(fields.get(each) not in _NOTHING for each in ("layers_to_transform", "exclude_modules"))
    patterns: dict[str, dict[str, Any]] = {}
    for field, is_valid in (("rank_pattern", _is_rank), ("alpha_pattern", _is_number)):
        given = fields.get(field) or {}
        if not isinstance(given, dict) or not all(map(is_valid, given.values())):
            rule = f"integers from 1 to {MAX_RANK}" if field == "rank_pattern" else "numbers" + _ALPHA_RANGE
            raise fail(field, f"must map names of modules to {rule}")
        if len(given) > MAX_PATTERNS:
            raise fail(field, f"must have at most {MAX_PATTERNS} keys")
        patterns[field] = {}
        for key, value in given.items():
            if (match := _PATTERN.fullmatch(key)) is None:
                rule = "such as q_proj or layers.0.self_attn.q_proj; ^ or .* may precede a name, and $ or .* follow it"
                raise fail(field, f"must have names of modules as keys, {rule}. Found: {shorten(key)}")
            start, name, has_any_end = match.groups()
            before = {"^": "^.", ".*": ""}.get(start, ".")
            text = f"{before}{name}{'' if has_any_end else '$'}".replace("\\", "")
            patterns[field].setdefault(text, value)
    rslora = fields.get("use_rslora", False)
    if not isinstance(rslora, bool):
        raise fail("use_rslora", "must be true or false")
    return AdapterConfig(
        path,
        rank,
        float(alpha),
        rslora,
        () if isinstance(targets, str) or is_partial else targets,
        patterns["rank_pattern"],
        patterns["alpha_pattern"],
    )


def fingerprint(folder: Path) -> str:
    """Return a hash of adapter_config.json and adapter_model.safetensors. Raise ModelError if one is unreadable."""
    digest = hashlib.sha256()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        try:
            with open_regular(folder / name) as file:
                while part := file.read(2**20):
                    digest.update(part)
        except OSError as error:
            raise ModelError(f"{folder / name}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def number_of(fingerprint: str) -> int:
    """Return the positive id of an adapter in requests, recordings and steps. Equal adapter files have equal ids."""
    return int(fingerprint[:8], 16) % (2**31 - 1) + 1


def _of_pattern(patterns: Mapping[str, Any], module: str, default: float) -> float:
    """Return the value of the first pattern that matches a module name, or `default`."""
    text = f"^.{module}$"
    return float(next((value for pattern, value in patterns.items() if pattern in text), default))


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_ALPHA
