"""Small random models with a layer for multi-token prediction (MTP), and models of that layer alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from families import models
from families.weights import weights_of
from support.model_factories import write_safetensors

NAMES = (
    "deepseek-v3",
    "deepseek-v3.2",
    "glm-4.7-flash",
    "glm-5",
    "glm4-moe",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
)


def prefixes(name: str) -> tuple[str, dict[str, str]]:
    """Return the prefix of the MTP layer, and the names of what surrounds it: joint input, norms and result."""
    config = models.model(name).config
    at = f"model.layers.{config['num_hidden_layers']}."
    if "num_nextn_predict_layers" in config:
        parts = {"embedding": "enorm", "hidden": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"}
        return at, {part: at + tensor for part, tensor in parts.items()}
    parts = {"embedding": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "project": "fc", "norm": "norm"}
    return "mtp.layers.0.", {part: f"mtp.{tensor}" for part, tensor in parts.items()}


def mtp_weights(name: str) -> dict[str, np.ndarray]:
    """Return the float32 tensors of a model and of its MTP layer, which has the form of the model's last layer."""
    given = models.model(name)
    layer, around = prefixes(name)
    hidden, last = given.config["hidden_size"], f"model.layers.{given.config['num_hidden_layers'] - 1}."
    shapes = {layer + key.removeprefix(last): shape for key, shape in given.shapes.items() if key.startswith(last)}
    for part, tensor in around.items():
        shapes[f"{tensor}.weight"] = (hidden, 2 * hidden) if part == "project" else (hidden,)
    return models.weights(name) | weights_of(name, replace(given, shapes=shapes))


def write_mtp_model(name: str, folder: Path, dtype: str = "bfloat16") -> dict[str, np.ndarray]:
    """Write a model with its MTP layer, and return its float32 tensors."""
    models.write(name, folder, dtype=dtype)
    weights = mtp_weights(name)
    write_safetensors(folder / "model.safetensors", {key: models.WRITERS[dtype](x) for key, x in weights.items()})
    return weights


def single_layer_config(name: str) -> dict[str, Any]:
    """Return the configuration of a model whose only layer is the MTP layer of another."""
    config = models.model(name).config | {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}
    changes = {
        "first_k_dense_replace": 0,
        "full_attention_interval": 1,
        "indexer_types": ["full"],
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse"],
    }
    return config | {key: value for key, value in changes.items() if key in config}


def write_single_layer(name: str, folder: Path, weights: dict[str, np.ndarray], rows: np.ndarray) -> None:
    """Write the model of the MTP layer alone in float32. Its token i has the embedding `rows[i]`."""
    layer, around = prefixes(name)
    folder.mkdir(exist_ok=True)
    config = single_layer_config(name) | {"torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    table = np.zeros((config["vocab_size"], config["hidden_size"]), np.float32)
    table[: len(rows)] = rows
    tensors = {"model.embed_tokens.weight": table, "lm_head.weight": weights["lm_head.weight"]}
    tensors["model.norm.weight"] = weights[f"{around['norm']}.weight"]
    for key, values in weights.items():
        part = key.removeprefix(layer)
        if key.startswith(layer) and f"{part}".split(".")[0] not in ("enorm", "hnorm", "eh_proj", "shared_head"):
            tensors[f"model.layers.0.{part}"] = values
    write_safetensors(folder / "model.safetensors", tensors)


def joined(name: str, weights: dict[str, np.ndarray], embedded: np.ndarray, states: np.ndarray) -> np.ndarray:
    """Return the input [T, H] of the MTP layer for embeddings and hidden states [T, H], in float64."""
    around, model = prefixes(name)[1], models.model(name)
    parts = []
    for part, x in (("embedding", embedded), ("hidden", states)):
        x = x.astype(np.float64)
        gain = weights[f"{around[part]}.weight"] + model.norm_offset
        parts.append(x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + model.config["rms_norm_eps"]) * gain)
    return np.concatenate(parts, axis=-1) @ weights[f"{around['project']}.weight"].T.astype(np.float64)


def write_predictable_model(folder: Path, tokenizer_folder: Path, vocab_size: int) -> None:
    """Write a Qwen3.5 with a tokenizer, whose MTP layer often predicts its tokens.

    The layers add little to the embedding, so the latest token mostly decides the next one. The MTP layer passes the
    embedding on unchanged.
    """
    name = "qwen3.5"
    given = models.model(name)
    sizes = {"model.embed_tokens.weight": (vocab_size, 64), "lm_head.weight": (vocab_size, 64)}
    weights = mtp_weights(name) | weights_of(name, replace(given, shapes=sizes))
    layer, around = prefixes(name)
    for key, values in weights.items():
        if key.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            values *= 0.0 if key.startswith(layer) else 0.01
    weights[f"{around['embedding']}.weight"][:] = 0.0
    weights[f"{around['project']}.weight"][:] = np.eye(64, 128)
    weights[f"{around['norm']}.weight"][:] = weights["model.norm.weight"]
    folder.mkdir(exist_ok=True)
    config = given.config | {"vocab_size": vocab_size, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.model").write_bytes((tokenizer_folder / "tokenizer.model").read_bytes())
    write_safetensors(folder / "model.safetensors", {key: models.WRITERS["bfloat16"](x) for key, x in weights.items()})
