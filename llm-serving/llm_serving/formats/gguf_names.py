"""The tensors of a GGUF file by the names, and with the rows, that Hugging Face's folders have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from llm_serving.errors import ModelError
from llm_serving.formats.packed import PackedTensor, ReadableTensor
from llm_serving.formats.quantized import QuantizedTensor
from llm_serving.formats.stored import Array, StoredTensor

METHOD: Final = "gguf"
"""`quant_method` of a configuration that was read out of such a file."""

_WHOLE: Final[Mapping[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYER: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME: Final = re.compile(r"^(?:blk\.(?P<layer>\d{1,6})\.)?(?P<role>[a-z_]+)\.(?P<kind>weight|bias)$")
_OTHER_FORM: Final = ("model.", "lm_head.")
"""How names of Hugging Face begin: under one of them a tensor would be taken with its rows in another order."""
ROTATION: Final = "rope_freqs.weight"
"""What frequencies of rotation are divided by: no weight, and part of the configuration."""


@dataclass(frozen=True)
class Gguf:
    """
    Attributes:
        heads, kv_heads: Whose rows the file has with neighbours turning together, as it has Llama's; 0: as they are.
    """

    described: str
    heads: int = 0
    kv_heads: int = 0
    activation_bits: int | None = None

    def weights(self, tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        weights: dict[str, ReadableTensor] = {}
        for name, tensor in tensors.items():
            if name == ROTATION:
                continue
            known = hugging_face_name(name)
            if known == name and name.startswith(_OTHER_FORM):
                raise ModelError(f"{tensor.file}: tensor {name} is not named as tensors of this form are")
            if known in weights:
                raise ModelError(f"{tensor.file}: tensor {name} stands twice, as {known}")
            weights[known] = self._turned(name, tensor)
        return weights

    def _turned(self, name: str, tensor: ReadableTensor) -> ReadableTensor:
        role = name.rpartition(".")[0].rpartition(".")[2]
        heads = {"attn_q": self.heads, "attn_k": self.kv_heads}.get(role, 0)
        if not heads:
            return tensor
        if tensor.shape[0] % (2 * heads):
            raise ModelError(f"{tensor.file}: tensor {name} must have rows of {heads} heads. Found: {tensor.shape[0]}")
        order = np.arange(tensor.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        if isinstance(tensor, StoredTensor):
            return PackedTensor(name, tensor.shape, {"rows": tensor}, lambda arrays: arrays["rows"][order])
        unpack = tensor.unpack
        return replace(tensor, unpack=lambda arrays: _in_order(unpack(arrays), order))


def hugging_face_name(name: str) -> str:
    """Of a tensor of the file; one that is not known keeps its name, which no model has a place for."""
    match = _NAME.match(name)
    known = match and (_OF_LAYER if match["layer"] else _WHOLE).get(match["role"])
    if match is None or known is None:
        return name
    return (
        f"model.layers.{int(match['layer'])}.{known}.{match['kind']}" if match["layer"] else f"{known}.{match['kind']}"
    )


def _in_order(found: QuantizedTensor | Array, order: Array) -> QuantizedTensor | Array:
    if isinstance(found, QuantizedTensor):
        return replace(found, codes=found.codes[order], scales=found.scales[order])
    return found[order]
