"""`llm-serving quantize`: write a model with 8-bit or 4-bit weights in the compressed-tensors format."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from llm_serving.cli.arguments import say
from llm_serving.core.dtypes import round_to_bfloat16
from llm_serving.errors import ConfigError, ModelError
from llm_serving.formats.compressed_tensors import PACKED, ROTATION, SCALE, SHAPE
from llm_serving.formats.quantized_tensor import ROTATED_BLOCK, QuantizedTensor, values_per_word
from llm_serving.formats.stored_tensor import Array
from llm_serving.hub.base import DownloadProgress
from llm_serving.models.spec import CONFIG_NAME, ModelSpec
from llm_serving.models.weight_reader import WeightReader, check_folder

from llm_serving_tools.mixed_bits import DEFAULT_MEAN_BITS, check_mean_bits, choose_8_bits
from llm_serving_tools.new_folder import check_absent, copy_small_files, new_folder
from llm_serving_tools.quantized_parts import parts_of, quantize_w4, quantize_w8
from llm_serving_tools.writer import TensorSource, write_safetensors

DEFAULT_GROUP_SIZE: Final = 128
CALIBRATED_GROUP_SIZE: Final = 32
_QUANTIZED_KINDS: Final = ("linear", "experts")
"""Kinds of operations whose weights are quantized. Other engines accept no quantized embeddings or routers."""


@dataclass(frozen=True)
class Format:
    """A quantized format: bits of the weights and bits of the activations. 16 bits mean the model dtype."""

    bits: int
    activation_bits: int

    @property
    def packed(self) -> bool:
        return self.activation_bits == 16

    def config(self, group_size: int | None, ignored: list[str], in_8_bits: set[str] | None) -> dict[str, Any]:
        """Return the `quantization_config`. `in_8_bits`: names of the matrices that have 8 bits, or None without
        calibration. Calibrated matrices are rotated.
        """
        rows = [self._row(["Linear"], self.bits, group_size)]
        if in_8_bits:
            rows.append(self._row(sorted(name.removesuffix(".weight") for name in in_8_bits), 8, None))
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if self.packed else "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {f"group_{number}": row for number, row in enumerate(rows)},
            "ignore": ignored,
            **({} if in_8_bits is None else {"transform_config": ROTATION}),
        }

    def _row(self, targets: list[str], bits: int, group_size: int | None) -> dict[str, Any]:
        weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
        if group_size is not None:
            weights |= {"strategy": "group", "group_size": group_size}
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
        return {
            "targets": targets,
            "weights": weights,
            "input_activations": inputs if self.activation_bits == 8 else None,
        }


FORMATS: Final = {"w8a8": Format(8, 8), "w8a16": Format(8, 16), "w4a16": Format(4, 16), "w4a8": Format(4, 8)}


def quantize(
    source: Path,
    target: Path,
    name: str,
    group_size: int | None = None,
    calibration: Path | None = None,
    mean_bits: float | None = None,
) -> None:
    """Quantize a model to one of `FORMATS`. The target folder appears only when it is complete. `group_size` is the
    number of columns that share a scale in 4 bits, or None for the default. `calibration`: a text file. The matrices to
    which the results are most sensitive on it get 8 bits instead of 4. `mean_bits`: largest mean number of bits of a
    quantized weight, with its scales, or None for `DEFAULT_MEAN_BITS`. Raise ConfigError if the source is quantized
    already, the group size does not divide its columns, the target exists, the disk is too small, options contradict
    each other, the text is unreadable or too short, or the model cannot be calibrated.
    """
    check_absent(target)
    form = FORMATS[name]
    if form.bits == 8 and group_size is not None:
        raise ConfigError(f"--group-size requires --format w4a16 or w4a8. Given: {name}")
    if name != "w4a16" and calibration is not None:
        raise ConfigError(f"--calibrate requires --format w4a16. Given: {name}")
    if mean_bits is not None and calibration is None:
        raise ConfigError(f"--mean-bits requires --calibrate. Given: {mean_bits:g}")
    default = DEFAULT_GROUP_SIZE if calibration is None else CALIBRATED_GROUP_SIZE
    size = default if form.bits == 4 and group_size is None else group_size
    spec = check_folder(source)
    if spec.scheme is not None:
        raise ConfigError(f"{source} must hold a model that is not quantised. Found: {spec.scheme.description}")
    quantized = _quantized_names(spec)
    _check_columns(spec, quantized, size, calibration is not None)
    in_8_bits = None
    if calibration is not None:
        assert size is not None
        mean_bits = DEFAULT_MEAN_BITS if mean_bits is None else mean_bits
        check_mean_bits(size, mean_bits)
        in_8_bits = _calibrate(spec, source, calibration, quantized, size, mean_bits)
    tensors = list(_tensors(spec, WeightReader(source), quantized, form, size, in_8_bits))
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    with new_folder(target, num_bytes) as folder, DownloadProgress(total=num_bytes, unit="B", unit_scale=True) as bar:
        copy_small_files(source, folder)
        write_safetensors(folder, tensors, bar.update)
        config = {**spec.config, "quantization_config": form.config(size, _ignored(spec, quantized), in_8_bits)}
        (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")


def _quantized_names(spec: ModelSpec) -> set[str]:
    operations = [each for each in spec.network.operations if each.kind in _QUANTIZED_KINDS]
    roles = ("weight", "gate_up", "down")
    weights = [each.weights[role] for each in operations for role in roles if role in each.weights]
    stored = [pair for weight in weights for pair in zip(weight.names, weight.stored_shapes, strict=True)]
    return {name for name, shape in stored if len(shape) == 2 and shape[0] > 1}


def _ignored(spec: ModelSpec, quantized: set[str]) -> list[str]:
    """Return the linear modules that stay unquantized. Other engines assume that unlisted modules are quantized."""
    operations = [each for each in spec.network.operations if each.kind in ("linear", "route", "lm_head")]
    names = [name for each in operations for name in each.weights["weight"].names if name not in quantized]
    heads = ["lm_head.weight", *names]
    return list(dict.fromkeys(name.removesuffix(".weight") for name in heads if "embed" not in name))


def _check_columns(spec: ModelSpec, quantized: set[str], group_size: int | None, rotates: bool) -> None:
    for name, shape in spec.tensors.items():
        if name not in quantized:
            continue
        if group_size is not None and (group_size < 1 or shape[1] % group_size):
            raise ConfigError(
                f"--group-size must divide the columns of every weight: {name} has {shape[1]}. Given: {group_size}"
            )
        if rotates and shape[1] % ROTATED_BLOCK:
            raise ConfigError(
                f"--calibrate requires a multiple of {ROTATED_BLOCK} columns in every weight: {name} has {shape[1]}. "
                "Quantize this model without --calibrate"
            )


def _calibrate(
    spec: ModelSpec, source: Path, text: Path, names: set[str], group_size: int, mean_bits: float
) -> set[str]:
    """Return the names of the matrices that get 8 bits."""
    from llm_serving_tools.calibration import SensitivityNetwork, windows_of  # imports MindSpore

    try:
        windows = windows_of(text.read_text(encoding="utf-8"), source, spec)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibrate must be a text file in UTF-8. Given: {text}: {error}") from None
    with DownloadProgress(total=len(names), unit="matrix", desc="measure") as bar:
        changes = SensitivityNetwork(spec, WeightReader(source), windows, names, group_size).changes(bar.update)
    return {name for weight in choose_8_bits(changes, group_size, mean_bits) for name in weight.names}


def _tensors(
    spec: ModelSpec,
    reader: WeightReader,
    quantized: set[str],
    form: Format,
    group_size: int | None,
    in_8_bits: set[str] | None,
) -> Iterator[TensorSource]:
    shapes = reader.shapes()
    expected_shapes = {
        **spec.tensors,
        **{name: shape for name, shape in shapes.items() if name in spec.network.optional},
    }
    for name, shape in expected_shapes.items():
        if name not in quantized:
            array = reader.read(name, shape)
            yield TensorSource(name, array.dtype, shape, lambda name=name, shape=shape: reader.read(name, shape))  # type: ignore[misc]
            continue
        bits = 8 if in_8_bits is not None and name in in_8_bits else form.bits
        size = group_size if bits == 4 else None
        parts = _Parts(reader, name, (shape[0], shape[1]), bits, size, form.packed, in_8_bits is not None)
        for ending, (dtype, part_shape) in parts.layout().items():
            full = f"{name.removesuffix('weight')}{ending}"
            yield TensorSource(full, np.dtype(dtype), part_shape, lambda parts=parts, ending=ending: parts.read(ending))  # type: ignore[misc]


class _Parts:
    """The tensors of one quantized weight. The first read of a tensor quantizes the weight; the last read frees all."""

    def __init__(
        self,
        reader: WeightReader,
        name: str,
        shape: tuple[int, int],
        bits: int,
        group_size: int | None,
        packed: bool,
        rotates: bool,
    ) -> None:
        self._reader, self._name, self._shape, self._bits = reader, name, shape, bits
        self._group_size, self._packed, self._rotates = group_size, packed, rotates
        self._parts: dict[str, Array] = {}

    @property
    def _has_bfloat16_scales(self) -> bool:
        return self._rotates and self._bits == 4

    def layout(self) -> dict[str, tuple[type[np.generic], tuple[int, ...]]]:
        out, width = self._shape
        groups = 1 if self._group_size is None else width // self._group_size
        scale = {SCALE: (np.uint16 if self._has_bfloat16_scales else np.float32, (out, groups))}
        if not self._packed:
            return {"weight": (np.int8, (out, width)), **scale}
        packed = (out, -(-width // values_per_word(self._bits)))
        return {PACKED: (np.int32, packed), **scale, SHAPE: (np.int64, (2,))}

    def read(self, ending: str) -> Array:
        if not self._parts:
            self._parts = parts_of(self._quantize(), self._packed)
            if self._has_bfloat16_scales:
                self._parts[SCALE] = round_to_bfloat16(self._parts[SCALE])
        return self._parts.pop(ending)

    def _quantize(self) -> QuantizedTensor:
        weight = self._reader.read(self._name, self._shape)
        try:
            if self._rotates:
                from llm_serving_tools.calibration import quantize_rotated  # imports MindSpore

                return quantize_rotated(weight, self._bits, self._group_size)
            return quantize_w8(weight) if self._group_size is None else quantize_w4(weight, self._group_size)
        except ModelError as error:
            raise ModelError(f"{self._name}: {error}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="FOLDER", help="folder of a model that is not quantised")
    parser.add_argument("target", type=Path, metavar="OUT", help="folder that does not exist")
    parser.add_argument(
        "--format",
        required=True,
        choices=tuple(FORMATS),
        help="bits of weights (w) and activations (a); w8 has one scale for each row",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="number of columns that share a scale (w4); default: 128, and 32 with --calibrate",
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="UTF-8 text: the matrices most sensitive on it get 8 bits instead of 4 (only with w4a16)",
    )
    parser.add_argument(
        "--mean-bits",
        type=float,
        metavar="X",
        help="largest mean number of bits of a quantised weight, with its scales (only with --calibrate); "
        f"default: {DEFAULT_MEAN_BITS}",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    given = arguments.source, arguments.target, arguments.format
    quantize(*given, arguments.group_size, arguments.calibrate, arguments.mean_bits)
    say(f"{arguments.target}: done")
    return 0
