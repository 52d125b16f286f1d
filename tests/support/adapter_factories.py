"""Low-rank adapters with random matrices, in the form of PEFT, and the weights with the adapters merged."""

import json
import math
from pathlib import Path

import numpy as np
from support.model_factories import from_bfloat16, to_bfloat16, weight_shapes, write_safetensors

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, spec, rank=4, targets=EVERY, seed=1, strength=0.5, dtype="float32", **fields):
    """Write an adapter of `spec`'s linear layers `targets`; return module -> scale * B @ A in float64."""
    rng = np.random.default_rng(seed)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), **fields}
    tensors, changes = {}, {}
    for name, shape in weight_shapes(spec).items():
        module = name.removesuffix(".weight")
        if not name.endswith(".weight") or module.rpartition(".")[2] not in targets:
            continue
        own = next((r for end, r in fields.get("rank_pattern", {}).items() if module.endswith(end)), config["r"])
        a = from_bfloat16(to_bfloat16(rng.normal(size=(own, shape[1])).astype(np.float32) / np.sqrt(shape[1])))
        b = from_bfloat16(to_bfloat16(strength * rng.normal(size=(shape[0], own)).astype(np.float32) / own))
        for part, values in (("A", a), ("B", b)):
            stored = to_bfloat16(values) if dtype == "bfloat16" else values
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = stored
        alpha = next(
            (v for end, v in fields.get("alpha_pattern", {}).items() if module.endswith(end)), config["lora_alpha"]
        )
        scale = alpha / (math.sqrt(own) if fields.get("use_rslora") else own)
        changes[module] = scale * b.astype(np.float64) @ a.astype(np.float64)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return changes


def merged(weights, changes):
    """Return float32 weights with the changes added."""
    result = dict(weights)
    for module, change in changes.items():
        name = f"{module}.weight"
        result[name] = (weights[name].astype(np.float64) + change).astype(np.float32)
    return result
