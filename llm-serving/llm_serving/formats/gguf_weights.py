"""The tensors of a GGUF file with the names and layouts of Hugging Face.

llama.cpp uses the same tensor names for every architecture. It stores some tensors in a layout of its own. `pairs`,
`plus_one` and `more` are fields of `Naming`, which describes one architecture:
    rows of query and key   With `pairs`, two rows that rotary embedding rotates as a pair are adjacent. In Hugging
                            Face's layout they are half a head apart.
    norm weights            With `plus_one`, the stored weight is Hugging Face's weight plus 1.
    experts                 All experts of a layer are in one tensor. Older files have one tensor for each expert.
    stacked projections     Some files have one tensor for query, key and value.
    latent keys, values     DeepSeek has two tensors with a matrix for each head. Key matrices are transposed.
    other tensors           `more` contains the function of module `gguf_layouts` that converts a tensor.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from llm_serving.errors import ModelError
from llm_serving.formats.gguf_layouts import (
    LATENT_VALUES,
    HeadCounts,
    experts_of,
    head_rows,
    joined_latents,
    less_one,
    rows_of,
    with_split_pairs,
)
from llm_serving.formats.gguf_names import LATENT_KEYS, NAMINGS, OF_LAYER, WHOLE, Naming
from llm_serving.formats.packed import PackedTensor, ReadableTensor
from llm_serving.formats.stored_tensor import StoredTensor

FREQUENCIES: Final = "rope_freqs.weight"
SHORT_FREQUENCIES: Final = "rope_factors_short.weight"
LONG_FREQUENCIES: Final = "rope_factors_long.weight"
_NO_WEIGHTS: Final = (FREQUENCIES, SHORT_FREQUENCIES, LONG_FREQUENCIES)
"""Tensors that are no weights but divisors of the rotary frequencies. `models.gguf` adds them to the configuration."""

_QUERY, _KEY = ".q_proj", ".k_proj"
_ONE_ROW: Final = ("shared_expert_gate", "mlp.moe_statics.e_score_correction_bias")
"""Tensors that are vectors in GGUF and matrices of one row in Hugging Face's layout."""
_WITHOUT_ENDING: Final = (".sinks", "layer_scalar", "correct_output_scale")
"""Ends of Hugging Face's names that have no `.weight`."""
_NAME: Final = re.compile(
    r"^(?:blk\.(?P<layer>\d{1,6})\.)?(?P<role>(?:shortconv\.|indexer\.|cls\.(?=output|norm))?[a-z0-9_]+)"
    r"(?:\.(?P<expert>\d{1,4}))?(?P<scale>\.scale)?(?:\.(?P<kind>weight|bias))?$"
)
_PREDICTING: Final = re.compile(r"^blk\.(?=\d{1,6}\.nextn\.)")
_HUGGING_FACE_PREFIXES: Final = ("model.", "lm_head.")
"""Prefixes of Hugging Face's names. GGUF files with such names are refused, because their row order is unknown."""


def named_weights(
    tensors: Mapping[str, ReadableTensor], architecture: str, heads: HeadCounts
) -> dict[str, ReadableTensor]:
    """Convert tensors with names of llama.cpp to Hugging Face's names and layouts; keep other tensors. Raise ModelError
    if a tensor already has Hugging Face's name, or if two tensors get the same name.
    """
    naming = NAMINGS[architecture]
    weights: dict[str, ReadableTensor] = {}
    for name, tensor in tensors.items():
        if name in _NO_WEIGHTS or _is_latent_values(name, tensors):
            continue
        for known, weight in _named(name, tensor, tensors, naming, heads):
            if known == name and name.startswith(_HUGGING_FACE_PREFIXES):
                raise ModelError(
                    f"{tensor.file}: tensor {name} must have a name of llama.cpp, like blk.0.attn_q.weight"
                )
            if known in weights:
                raise ModelError(f"{tensor.file}: tensor {name} is {known}, and so is an earlier tensor")
            weights[known] = weight
    return weights


def _is_latent_values(name: str, tensors: Mapping[str, ReadableTensor]) -> bool:
    return LATENT_VALUES in name and name.replace(LATENT_VALUES, LATENT_KEYS) in tensors


def _named(
    name: str, tensor: ReadableTensor, tensors: Mapping[str, ReadableTensor], naming: Naming, heads: HeadCounts
) -> Iterator[tuple[str, ReadableTensor]]:
    match = _NAME.match(name)
    expert = None if match is None else match["expert"]
    role = (
        "" if match is None else match["role"] + (match["scale"] or "") if expert is None else f"{match['role']}_exps"
    )
    known = match and ({**OF_LAYER, **naming.more} if match["layer"] else {**WHOLE, **naming.whole}).get(role)
    if match is None or known is None:
        yield _PREDICTING.sub("model.layers.", name), tensor
        return
    prefix, ending = f"{naming.layers}.{int(match['layer'])}." if match["layer"] else "", match["kind"] or ""
    if isinstance(known, tuple):
        for made in known:
            yield f"{prefix}{_ended(made.name, ending)}", made.layout(name, tensor, heads)
        return
    if role == LATENT_KEYS:
        tensor = joined_latents(name, tensor, tensors.get(name.replace(role, LATENT_VALUES)), heads.q)
    if "*" not in known or expert is not None:
        experts = {int(expert or 0): tensor}
    else:
        experts = dict(enumerate(experts_of(name, tensor)))
    for number, part in experts.items():
        for each, weight in _apart(name, known.replace("*", str(number)), part, heads):
            yield f"{prefix}{_ended(each, ending)}", _in_layout(name, each, weight, naming, heads)


def _ended(name: str, ending: str) -> str:
    return name if not ending or name.endswith((f"_{ending}", f".{ending}", *_WITHOUT_ENDING)) else f"{name}.{ending}"


def _apart(name: str, known: str, tensor: ReadableTensor, heads: HeadCounts) -> list[tuple[str, ReadableTensor]]:
    """Split a GGUF tensor of several matrices, such as Q, K and V, into (name, matrix). `known`: "name|name|name"."""
    names = known.split("|")
    if len(names) == 1:
        return [(known, tensor)]
    counts = (heads.q, heads.kv, heads.kv) if len(names) == 3 else (1,) * len(names)
    own = head_rows(name, tensor, sum(counts))
    starts = itertools.accumulate(counts, initial=0)
    return [
        (each, rows_of(tensor, start * own, (count * own, *tensor.shape[1:])))
        for each, start, count in zip(names, starts, counts, strict=False)
    ]


def _in_layout(name: str, known: str, tensor: ReadableTensor, naming: Naming, heads: HeadCounts) -> ReadableTensor:
    if naming.pairs and known.endswith((_QUERY, _KEY)):
        return with_split_pairs(name, tensor, heads.q if known.endswith(_QUERY) else heads.kv)
    if naming.plus_one and known.endswith("norm") and isinstance(tensor, StoredTensor):
        return PackedTensor(name, tensor.shape, {"values": tensor}, less_one)
    if known.endswith(_ONE_ROW) and len(tensor.shape) == 1 and isinstance(tensor, StoredTensor):
        return replace(tensor, shape=(1, *tensor.shape))
    return tensor
