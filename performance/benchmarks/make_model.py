"""Write a model folder with random weights, for measuring speed.

    python performance/run.py make_model SHAPE FOLDER

`1.1b` has the shape of TinyLlama, `135m` that of SmolLM2, `15m` that of stories15M (llama2.c). `1b-active` is a Qwen3
mixture of experts with 3.1 billion weights, 1.0 billion of them active for a token. `350m-hybrid` is a Qwen3.5, in
which three of every four layers keep fixed-size states; `350m` is a Llama of the same size in bytes. All have a
vocabulary of 32,000 tokens and seeded normal weights in bfloat16. The tokenizer is the demo model's, extended by one
word for each further id: a server sends an event only when there is text, so every token needs a text for its
arrival to be visible.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from llm_serving.models.spec import ModelSpec

DEMO_MODEL = Path(__file__).resolve().parents[2] / "llm-serving" / "llm_serving" / "demo_model"
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "1.1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
    "135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "15m": {
        "hidden_size": 288,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 48,
        "tie_word_embeddings": True,
    },
    "350m": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "350m-hybrid": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 2336,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "tie_word_embeddings": True,
    },
    "1b-active": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
VOCAB_SIZE = 32000
STANDARD_DEVIATION = 0.02
SEED = 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--positions", type=int, default=4096, help="the longest context")
    arguments = parser.parse_args(argv)
    make_model({**SHAPES[arguments.shape], "max_position_embeddings": arguments.positions}, arguments.folder)
    return 0


def make_model(shape: Mapping[str, Any], folder: Path) -> None:
    """Write config.json, model.safetensors and a tokenizer into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_safetensors(folder / "model.safetensors", list(ModelSpec.from_hugging_face(config).tensors.items()))
    shutil.copy(DEMO_MODEL / "tokenizer_config.json", folder)
    demo_size = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
    words = b"".join(_piece(f"\u2581word{token_id}") for token_id in range(demo_size, VOCAB_SIZE))
    (folder / "tokenizer.model").write_bytes((DEMO_MODEL / "tokenizer.model").read_bytes() + words)


def _piece(text: str) -> bytes:
    """Return a vocabulary entry in protobuf form: bytes behind a serialized `ModelProto` extend its pieces (field 1).

    Its fields are the text (1) and a score (2) that is too low for the tokenizer to choose it.
    """
    encoded = text.encode()
    message = b"\x0a" + bytes([len(encoded)]) + encoded + b"\x15" + struct.pack("<f", -1e9)
    return b"\x0a" + bytes([len(message)]) + message


def _write_safetensors(path: Path, tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    header, offset = {}, 0
    for name, shape in tensors:
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    rng = np.random.default_rng(SEED)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for _, shape in tensors:
            file.write(_weights(rng, shape).tobytes())


def _weights(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """Return bfloat16 bits: norm weights are 1, all others are normal."""
    if len(shape) == 1:
        values = np.ones(shape, np.float32)
    else:
        values = rng.standard_normal(shape, np.float32) * np.float32(STANDARD_DEVIATION)
    return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
