"""The GGUF metadata of encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llm_serving.errors import ModelError
from llm_serving.models.gguf_metadata import Architecture, Config, MetadataReader

LAYER_NORM: Final = "attention.layer_norm_epsilon"
_CLASSIFIER: Final = "cls.output.weight"
_MEAN: Final = 1


def _bert(reader: MetadataReader, config: Config) -> None:
    config["max_position_embeddings"] = _rows(reader, "position_embd.weight")
    config["type_vocab_size"] = _rows(reader, "token_types.weight")
    _classifier(reader, config, "BertForSequenceClassification")


def _modern_bert(reader: MetadataReader, config: Config) -> None:
    del config["rope_theta"]  # each kind of layer has its own base
    config["hidden_activation"] = reader.value(reader.key("hidden_activation"), "gelu")
    config["classifier_bias"] = reader.has_tensor("cls.bias")
    mean = reader.value(reader.key("classifier.pooling_type"), _MEAN) == _MEAN
    config["classifier_pooling"] = "mean" if mean else "cls"
    _classifier(reader, config, "ModernBertForSequenceClassification")


def _rows(reader: MetadataReader, name: str) -> int:
    tensor = reader.found.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        raise ModelError(f"{reader.found.file}: must have a tensor {name} with two dimensions")
    return tensor.shape[0]


def _classifier(reader: MetadataReader, config: Config, family: str) -> None:
    if reader.has_tensor(_CLASSIFIER):
        config |= {"architectures": [family], "num_labels": _rows(reader, _CLASSIFIER)}


ENCODERS: Final[Mapping[str, Architecture]] = {
    "bert": Architecture("BertModel", {LAYER_NORM: "layer_norm_eps"}, complete=_bert),
    "modern-bert": Architecture(
        "ModernBertModel",
        {
            "attention.layer_norm_rms_epsilon": "norm_eps",
            LAYER_NORM: "norm_eps",
            "rope.freq_base": "global_rope_theta",
            "rope.freq_base_swa": "local_rope_theta",
            "attention.sliding_window": "local_attention",
            "attention.sliding_window_pattern": "global_attn_every_n_layers",
        },
        bias={
            "attention_bias": ("attn_qkv.bias",),
            "mlp_bias": ("ffn_up.bias",),
            "norm_bias": ("ffn_norm.bias",),
        },
        complete=_modern_bert,
    ),
}
