"""Adapters of small models in the form of PEFT, and the log-probabilities that PEFT computes with them.

    PYTHONPATH=tests python -m families.adapters     # writes golden_adapters.npz; needs torch, transformers and peft

The other functions need NumPy and safetensors only. The file was written with PEFT 0.21.2, transformers 5.24 and
PyTorch 2.13.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from families import models
from safetensors import safe_open
from safetensors.numpy import save_file

GOLDEN: Final = Path(__file__).with_name("golden_adapters.npz")
PROMPT: Final = (3, 17, 25, 9, 44, 60, 31, 12, 5, 71, 8, 2, 19)
LINEAR: Final = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "qkv_proj",
    "gate_up_proj",
)
PATTERNS: Final = {
    "rank_pattern": {"o_proj": 7, "layers.0.self_attn.q_proj": 2, "^model.layers.1.mlp.*": 5},
    "alpha_pattern": {"down_proj": 1, "layers.1.self_attn.o_proj": 30},
}


class Case(NamedTuple):
    """A model of `families.models`, and fields of adapter_config.json."""

    model: str
    fields: Mapping[str, Any]
    targets: tuple[str, ...] = LINEAR


CASES: Final = {
    "llama3.1": Case("llama3.1", {"r": 4, "lora_alpha": 8}),
    "qwen3, rslora": Case("qwen3", {"r": 8, "lora_alpha": 4, "use_rslora": True}),
    "gemma3, patterns": Case("gemma3", {"r": 4, "lora_alpha": 8, **PATTERNS}),
    "phi3, patterns": Case("phi3", {"r": 4, "lora_alpha": 8, **PATTERNS}),
    "olmo2, names": Case("olmo2", {"r": 16, "lora_alpha": 16}, ("q_proj", "down_proj")),
}


def write(case: Case, model: Path, adapter: Path) -> None:
    """Write a model and an adapter with random matrices into two folders."""
    models.write(case.model, model)
    rng, tensors = np.random.default_rng(5), dict[str, np.ndarray]()
    with safe_open(model / "model.safetensors", "numpy") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in case.targets:
            rank = _rank_of(module, case.fields)
            for part, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                values = rng.standard_normal(size) * 0.5 / np.sqrt(size[1])
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = values.astype(np.float32)
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "target_modules": targets, **case.fields}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, adapter / "adapter_model.safetensors")


def _rank_of(module: str, fields: Mapping[str, Any]) -> int:
    """Return the rank that `fields` give to a module. PEFT compares it with its own when it loads the adapter."""
    if "rank_pattern" in fields:
        if module.endswith(".o_proj"):
            return 7
        if module == "model.layers.0.self_attn.q_proj":
            return 2
        if module.startswith("model.layers.1.mlp."):
            return 5
    rank: int = fields["r"]
    return rank


def logprobs_of_peft(model: Path, adapter: Path) -> np.ndarray:
    """Return the log-probabilities after each token of `PROMPT`, float32 [tokens, vocabulary]."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, adapter).eval()(torch.tensor([PROMPT])).logits
    return logits[0].log_softmax(-1).numpy()


def main() -> None:
    found = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as adapter:
            write(case, Path(model), Path(adapter))
            found[name] = logprobs_of_peft(Path(model), Path(adapter))
    np.savez_compressed(GOLDEN, **found)


if __name__ == "__main__":
    main()
