"""Shape and configuration files of the demo model."""

import json
from pathlib import Path
from typing import Any

SEED = 20
VOCAB_SIZE = 2048
BOS_ID, EOS_ID, PAD_ID = 1, 2, 3

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

GENERATION_CONFIG = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": False}

# The model answers each question without context, so the prompt is the last user message.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages if message['role'] == 'user' %}"
    "{% if loop.last %}{{ message['content'] }}{% endif %}{% endfor %}"
)

TOKENIZER_CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "add_prefix_space": True,
    "legacy": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONFIG["max_position_embeddings"],
    "chat_template": CHAT_TEMPLATE,
}


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_configuration(folder: Path) -> None:
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", GENERATION_CONFIG)
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
