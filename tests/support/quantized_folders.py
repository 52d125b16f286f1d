"""Folders of quantized models in the layouts of public tools, packed bit by bit with Python integers.

The values of a folder are computed here from the definition of each layout, without the code under test.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.models.spec import ModelSpec
from llm_serving_tools.quantized_parts import quantize_w4, quantize_w8
from support.asymmetric import asymmetric_w4
from support.model_factories import random_weights, write_safetensors

Arrays = dict[str, np.ndarray]


class Layout(NamedTuple):
    """Attributes:
    config: `quantization_config` of a config.json.
    write: Matrix -> its stored parts by name ending, and the values that they represent.
    """

    config: dict[str, Any]
    write: Callable[[np.ndarray], tuple[Arrays, np.ndarray]]


def words(qvalues: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Pack [n, m] quantized values into [n, ceil(m * bits / 32)] int32; nibble i of a word is value order[i]."""
    values_per_word = 32 // bits
    order = order or tuple(range(values_per_word))
    rows = []
    for row in qvalues.tolist():
        row += [0] * (-len(row) % values_per_word)
        found = []
        for at in range(0, len(row), values_per_word):
            value = sum(row[at + order[i]] << (bits * i) for i in range(values_per_word))
            found.append(value - 2**32 if value >= 2**31 else value)
        rows.append(found)
    return np.array(rows, np.int32)


def halved(tensor: QuantizedTensor) -> QuantizedTensor:
    """Return values with float16 scales, as files of GPTQ and AWQ have them."""
    scales = tensor.scales.astype(np.float16).astype(np.float32)
    return QuantizedTensor(tensor.qvalues, scales, tensor.zeros, tensor.bits, tensor.group_size, tensor.g_idx)


def unsigned(tensor: QuantizedTensor) -> tuple[np.ndarray, np.ndarray]:
    """Return quantized values and zeros, both >= 0, int64."""
    half = 2 ** (tensor.bits - 1)
    qvalues = tensor.qvalues.astype(np.int64) + (half if tensor.bits == 8 else 0)
    zeros = np.full(tensor.scales.shape, half)
    if tensor.zeros is not None:
        zeros = tensor.zeros.astype(np.int64) + (half if tensor.bits == 8 else 0)
    return qvalues, zeros


def with_zeros(tensor: QuantizedTensor) -> QuantizedTensor:
    """Return the 8-bit values with another zero point in each group."""
    zeros = (np.arange(tensor.scales.size) % 256 - 128).astype(np.int8).reshape(tensor.scales.shape)
    return replace(tensor, zeros=zeros)


def act_order(tensor: QuantizedTensor) -> QuantizedTensor:
    """Return the same values with columns assigned to groups in random order."""
    columns = np.random.default_rng(3).permutation(tensor.shape[1]) // tensor.group_size
    return QuantizedTensor(
        tensor.qvalues, tensor.scales, tensor.zeros, tensor.bits, tensor.group_size, columns.astype(np.int32)
    )


def gptq(tensor: QuantizedTensor, less_one: int = 1) -> tuple[Arrays, np.ndarray]:
    tensor = halved(tensor)
    qvalues, zeros = unsigned(tensor)
    group_of = np.arange(tensor.shape[1]) // tensor.group_size if tensor.g_idx is None else tensor.g_idx
    parts = {
        "qweight": words(qvalues, tensor.bits).T,
        "qzeros": words((zeros.T - less_one) % 2**tensor.bits, tensor.bits),
        "scales": tensor.scales.T.astype(np.float16),
        "g_idx": group_of.astype(np.int32),
    }
    return parts, tensor.dequantized()


def awq(tensor: QuantizedTensor) -> tuple[Arrays, np.ndarray]:
    tensor = halved(tensor)
    qvalues, zeros = unsigned(tensor)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": words(qvalues.T, 4, order),
        "qzeros": words(zeros.T, 4, order),
        "scales": tensor.scales.T.astype(np.float16),
    }
    return parts, tensor.dequantized()


def int_quantized(tensor: QuantizedTensor) -> tuple[Arrays, np.ndarray]:
    qvalues = tensor.qvalues if tensor.bits == 8 else tensor.qvalues.astype(np.int8) - np.int8(8)
    return {"weight": qvalues, "weight_scale": tensor.scales}, tensor.dequantized()


def pack_quantized(tensor: QuantizedTensor) -> tuple[Arrays, np.ndarray]:
    qvalues, zeros = unsigned(tensor)
    parts = {
        "weight_packed": words(qvalues, tensor.bits),
        "weight_shape": np.array(tensor.shape, np.int64),
        "weight_scale": tensor.scales,
    }
    if tensor.zeros is not None:
        parts["weight_zero_point"] = words(zeros.T, tensor.bits).T
    if tensor.g_idx is not None:
        parts["weight_g_idx"] = tensor.g_idx
    return parts, tensor.dequantized()


def fp8_numbers() -> np.ndarray:
    """Return the 256 values of e4m3 from its definition."""
    found = []
    for bits in range(256):
        sign, exponent, fraction = -1 if bits & 128 else 1, bits >> 3 & 15, bits & 7
        value = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
        found.append(sign * (np.nan if bits & 127 == 127 else value))
    return np.array(found, np.float32)


def fp8(weight: np.ndarray, block: tuple[int, int], name: str, shape: tuple[int, ...] | None = None):
    """Return values with a scale for each block, optionally stored in another shape."""
    numbers = fp8_numbers()[:127]
    rows, columns = block
    out, width = weight.shape
    scale = np.empty((-(-out // rows), -(-width // columns)), np.float32)
    bits, values = np.empty(weight.shape, np.uint8), np.empty_like(weight)
    for i, j in np.ndindex(*scale.shape):
        at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        scale[i, j] = np.abs(weight[at]).max() / 448
        nearest = np.abs(np.abs(weight[at] / scale[i, j])[..., None] - numbers).argmin(axis=-1)
        bits[at] = nearest | np.where(weight[at] < 0, 128, 0)
        values[at] = np.copysign(numbers[nearest], weight[at]) * scale[i, j]
    return {"weight": bits, name: scale if shape is None else scale.reshape(shape)}, values


def compressed(form: str, **weights: object) -> dict[str, object]:
    row = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": row}}


def of_gptq(**changes: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, **changes}


LAYOUTS: dict[str, Layout] = {
    "compressed-tensors, W8A8": Layout(
        compressed("int-quantized", num_bits=8, strategy="channel"), lambda w: int_quantized(quantize_w8(w))
    ),
    "compressed-tensors, W8A16": Layout(
        compressed("pack-quantized", num_bits=8, strategy="channel"), lambda w: pack_quantized(quantize_w8(w))
    ),
    "compressed-tensors, W4A16": Layout(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
        lambda w: pack_quantized(quantize_w4(w, 32)),
    ),
    "compressed-tensors, W4A16, zeros": Layout(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
        lambda w: pack_quantized(asymmetric_w4(w, 32)),
    ),
    "compressed-tensors, W4A16, act-order": Layout(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, actorder="group"),
        lambda w: pack_quantized(act_order(quantize_w4(w, 32))),
    ),
    "compressed-tensors, W4A8": Layout(
        compressed("int-quantized", num_bits=4, strategy="group", group_size=32),
        lambda w: int_quantized(quantize_w4(w, 32)),
    ),
    "compressed-tensors, FP8": Layout(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        lambda w: fp8(w, (1, w.shape[1]), "weight_scale"),
    ),
    "GPTQ, 4 bits": Layout(of_gptq(), lambda w: gptq(asymmetric_w4(w, 32))),
    "GPTQ, 4 bits, symmetric": Layout(of_gptq(), lambda w: gptq(quantize_w4(w, 32))),
    "GPTQ, 4 bits, second version": Layout(
        of_gptq(checkpoint_format="gptq_v2"), lambda w: gptq(asymmetric_w4(w, 32), 0)
    ),
    "GPTQ, 4 bits, act-order": Layout(of_gptq(desc_act=True), lambda w: gptq(act_order(asymmetric_w4(w, 32)))),
    "GPTQ, 8 bits": Layout(of_gptq(bits=8, group_size=-1), lambda w: gptq(quantize_w8(w))),
    "GPTQ, 8 bits, zeros": Layout(
        of_gptq(bits=8, group_size=-1, sym=False), lambda w: gptq(with_zeros(quantize_w8(w)))
    ),
    "compressed-tensors, W8A16, zeros": Layout(
        compressed("pack-quantized", num_bits=8, strategy="channel", symmetric=False),
        lambda w: pack_quantized(with_zeros(quantize_w8(w))),
    ),
    "AWQ, 4 bits": Layout(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        lambda w: awq(asymmetric_w4(w, 32)),
    ),
    "FP8, a scale for all": Layout(
        {"quant_method": "fp8", "activation_scheme": "static"}, lambda w: fp8(w, w.shape, "weight_scale", ())
    ),
    "FP8 of ModelOpt": Layout(
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        lambda w: fp8(w, w.shape, "weight_scale", ()),
    ),
    "FP8, a scale for a block": Layout(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40]},
        lambda w: fp8(w, (24, 40), "weight_scale_inv"),
    ),
}


def is_quantized(name: str) -> bool:
    """Return whether tools quantize a tensor: they do for projections of layers, not for embeddings and the LM head."""
    return name.endswith("_proj.weight")


def write_quantized(
    folder: Path,
    layout: Layout,
    config: dict[str, object],
    seed: int = 0,
    others: Mapping[str, Layout] | None = None,
) -> Arrays:
    """Write random weights of a configuration in a layout; return the float32 values that they represent. `others`:
    name of a weight -> another layout of compressed-tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    quantization = copy.deepcopy(layout.config)
    others = others or {}
    for number, (name, other) in enumerate(others.items(), start=1):
        row = {**other.config["config_groups"]["group_0"], "targets": [name.removesuffix(".weight")]}
        quantization["config_groups"][f"group_{number}"] = row
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    stored: Arrays = {}
    values: Arrays = {}
    for name, array in random_weights(ModelSpec.from_hugging_face(config), seed).items():
        if is_quantized(name):
            parts, values[name] = others.get(name, layout).write(array)
            stored |= {f"{name.removesuffix('weight')}{ending}": each for ending, each in parts.items()}
        else:
            stored[name] = values[name] = array
    write_safetensors(folder / "model.safetensors", stored)
    return values
