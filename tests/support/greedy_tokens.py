"""Greedy answers of small models of two families in float32, for any format of their weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from llm_serving.models.weight_reader import check_folder
from llm_serving.network.quantization import Quantization
from support.graph_model import GraphModel, backend
from support.model_factories import TINY

FAMILIES = {"llama": TINY, "qwen2": {**TINY, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}}
PROMPT = np.random.default_rng(5).integers(0, 96, 20).tolist()


def greedy(folder: Path, quantization: Quantization | None = None, num_tokens: int = 6) -> list[int]:
    """Return the most likely tokens after `PROMPT`."""
    model = GraphModel(check_folder(folder), folder, backend("cpu", "float32"), quantization=quantization)
    tokens, done = list(PROMPT), 0
    for _ in range(num_tokens):
        logits = model.logits((tokens[done:], done, [4, 9, 2]))
        done = len(tokens)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(PROMPT) :]
