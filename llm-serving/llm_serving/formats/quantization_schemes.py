"""Selects the quantization scheme that a config.json specifies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from llm_serving.core.dtypes import describe_quantization, groups_of
from llm_serving.errors import ModelError, shorten
from llm_serving.formats.compressed_tensors import ROTATION, CompressedTensors
from llm_serving.formats.packed import Scheme
from llm_serving.formats.packed_words import Awq, Gptq
from llm_serving.formats.quantized_tensor import QValuesForm
from llm_serving.formats.small_floats import Fp8, Mxfp4

READ: Final = "compressed-tensors (W8A8, W8A16, W4A16, W4A8, FP8), GPTQ of 4 and 8 bits, AWQ of 4 bits, FP8, MXFP4"
_MAX_GROUP: Final = 2**20
_COMPRESSED_FORMS: Final = ("int-quantized", "pack-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_UNORDERED: Final = ("group", "dynamic", True)
"""Values of `actorder` with which the columns of a group need not be adjacent."""
_MODELOPT_FP8: Final = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")


class _RefusedError(Exception):
    """The configuration is not supported. The message continues a sentence that begins with `quantization_config`."""


def scheme_of(config: Mapping[str, Any], where: str) -> Scheme | None:
    """Return the scheme of quantized weights, or None. Raise ModelError for an unsupported one in the file `where`."""
    description = describe_quantization(config)
    if description is None:
        return None
    given = config["quantization_config"]
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    make = _SCHEMES.get(method.lower()) if isinstance(method, str) else None
    try:
        if make is None:
            raise _RefusedError(f"has an unsupported `quant_method`. Given: {shorten(method)}")
        return make(given, description)
    except _RefusedError as refused:
        raise ModelError(
            f"{where}: the weights are quantised by {description}, which cannot be served: `quantization_config` "
            f"{refused}. Supported: {READ}. Or use a copy of the model in bfloat16, float16 or float32"
        ) from None


def _gptq(given: Mapping[str, Any], description: str) -> Scheme:
    bits = _number(given, ("bits",), (4, 8))
    form = given.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise _RefusedError(f"must have a `checkpoint_format` of gptq or gptq_v2. Given: {shorten(form)}")
    if given.get("dynamic"):
        raise _RefusedError(f"must not have `dynamic`, settings for single layers. Given: {shorten(given['dynamic'])}")
    group_size = _group_size(given, ("group_size",))
    act_order = group_size > 0 and given.get("desc_act") is True
    has_zeros = given.get("sym") is False
    return Gptq(description, bits, group_size, zeros_less_one=form == "gptq", act_order=act_order, has_zeros=has_zeros)


def _awq(given: Mapping[str, Any], description: str) -> Scheme:
    _number(given, ("bits", "w_bit"), (4,))
    form = str(given.get("version") or "gemm").lower()
    if form != "gemm":
        raise _RefusedError(f"must have a `version` of gemm. Given: {shorten(form)}")
    return Awq(description, _group_size(given, ("group_size", "q_group_size")))


def _compressed(given: Mapping[str, Any], description: str) -> Scheme:
    groups = groups_of(given)
    forms = [given.get("format"), *(row.get("format") for row in groups)]
    if unknown := [each for each in forms if each not in (None, "dense", *_COMPRESSED_FORMS)]:
        raise _RefusedError(f"must have a `format` of {', '.join(_COMPRESSED_FORMS)}. Given: {shorten(unknown[0])}")
    for key in ("sparsity_config", "transform_config"):
        found, is_transform = given.get(key), key == "transform_config"
        is_dense = isinstance(found, Mapping) and found.get("format") == "dense"
        if found and not is_dense and not (is_transform and found == ROTATION):
            allowed = " except the rotation that `quantize --calibrate` writes" if is_transform else ""
            raise _RefusedError(f"must not have `{key}`{allowed}. Given: {shorten(found)}")
    rows = [row for row in groups if isinstance(row.get("weights"), Mapping)]
    weights = [row["weights"] for row in rows]
    for row in weights:
        kind, bits = row.get("type") or "int", row.get("num_bits")
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise _RefusedError(
                f"must have weights of 4-bit or 8-bit integers or 8-bit floating point. Given: {shorten((kind, bits))}"
            )
    sizes = {_group_size(row, ("group_size",)) for row in weights} - {0}
    bits = {row.get("num_bits") for row in weights}
    inputs = [each for row in groups if isinstance(each := row.get("input_activations"), Mapping)]
    in_8_bits = bool(inputs) and all(each.get("num_bits") == 8 for each in inputs)
    named, others = _named_in_8_bits(rows)
    integers = all((row.get("type") or "int") == "int" for row in weights)
    return CompressedTensors(
        description,
        activation_bits=8 if in_8_bits and integers else None,
        group_size=sizes.pop() if len(sizes) == 1 else 0,
        bits=4 if bits == {4} else 8,
        form=_form(others),
        in_8_bits=named,
        rotated=given.get("transform_config") == ROTATION,
        block=next((block for row in weights if (block := _block(row.get("block_structure"))) is not None), None),
    )


def _named_in_8_bits(rows: Sequence[Mapping[str, Any]]) -> tuple[frozenset[str], list[Mapping[str, Any]]]:
    """If some named modules have 8 bits and all other weights 4, return these names and the settings of the others.
    Otherwise return no names and all settings.
    """
    others = [row for row in rows if _form([row["weights"]]) != QValuesForm(8, 0) or not _names_of(row)]
    if {row["weights"].get("num_bits") for row in others} != {4}:
        return frozenset(), [row["weights"] for row in rows]
    names = [name for row in rows if row not in others for name in _names_of(row)]
    return frozenset(names), [row["weights"] for row in others]


def _names_of(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the modules to which a row applies, or [] if it applies to classes or patterns."""
    targets = row.get("targets")
    names = targets if isinstance(targets, list) else []
    return names if all(isinstance(each, str) and "." in each and not each.startswith("re:") for each in names) else []


def _form(weights: Sequence[Mapping[str, Any]]) -> QValuesForm | None:
    forms = {
        QValuesForm(
            row["num_bits"],
            _group_size(row, ("group_size",)),
            row.get("actorder") not in _UNORDERED,
            row["num_bits"] == 8 and row.get("symmetric") is False,
        )
        for row in weights
        if (row.get("type") or "int") == "int"
    }
    return forms.pop() if len(forms) == 1 else None


def _fp8(given: Mapping[str, Any], description: str) -> Scheme:
    form = given.get("fmt") or "e4m3"
    if form != "e4m3":
        raise _RefusedError(f"must have a `fmt` of e4m3. Given: {shorten(form)}")
    return Fp8(description, _block(given.get("weight_block_size")))


def _modelopt(given: Mapping[str, Any], description: str) -> Scheme:
    """Return the scheme of ModelOpt. `quant_algo` is in `given` or, in ModelOpt's own file, in its `quantization`."""
    nested = given.get("quantization")
    algorithm = (nested if isinstance(nested, Mapping) else given).get("quant_algo")
    if algorithm not in _MODELOPT_FP8:
        raise _RefusedError(f"must have a `quant_algo` of {' or '.join(_MODELOPT_FP8)}. Given: {shorten(algorithm)}")
    return Fp8(description)


def _mxfp4(given: Mapping[str, Any], description: str) -> Scheme:
    return Mxfp4(description)


_SCHEMES: Final[Mapping[str, Callable[[Mapping[str, Any], str], Scheme]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}


def _number(given: Mapping[str, Any], keys: tuple[str, ...], allowed: tuple[int, ...]) -> int:
    key = next((each for each in keys if given.get(each) is not None), keys[0])
    value = given.get(key)
    if isinstance(value, bool) or value not in allowed:
        rule = " or ".join(map(str, allowed))
        raise _RefusedError(f"must have `{key}` {rule}. Given: {shorten(value)}")
    return int(value)


def _group_size(given: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    key = next((each for each in keys if given.get(each) is not None), keys[0])
    value = given.get(key)
    if value is None or value == -1:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_GROUP:
        raise _RefusedError(f"must have a `{key}` from 1 to {_MAX_GROUP}, or -1. Given: {shorten(value)}")
    return value


def _block(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(each) is int for each in value):
        raise _RefusedError(f"must have blocks of two dimensions, both integers. Given: {shorten(value)}")
    rows, columns = value
    if not (0 < rows <= _MAX_GROUP and 0 < columns <= _MAX_GROUP):
        raise _RefusedError(f"must have a block of two dimensions from 1 to {_MAX_GROUP}. Given: {shorten(value)}")
    return rows, columns
