"""Small random encoders and rerankers, and the vectors and scores that `transformers` computes of them in float32.

PYTHONPATH=tests python -m families.encoders     # writes the golden values; needs torch and transformers
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from families.drawn import bell, integers
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).with_name("golden_encoders.safetensors")
LENGTHS = (1, 5, 60, 200)
VOCAB = 120
Shapes = dict[str, tuple[int, ...]]

_COMMON: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 56, "num_attention_heads": 3, "num_hidden_layers": 3, "vocab_size": VOCAB,
    "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "torch_dtype": "float32",
}  # fmt: skip
BERT: dict[str, Any] = _COMMON | {
    "architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    "max_position_embeddings": 256, "pad_token_id": 0, "type_vocab_size": 2,
}  # fmt: skip
XLM_ROBERTA: dict[str, Any] = BERT | {
    "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "layer_norm_eps": 1e-5, "bos_token_id": 0,
    "eos_token_id": 2, "max_position_embeddings": 258, "pad_token_id": 1, "type_vocab_size": 1,
}  # fmt: skip
MODERNBERT: dict[str, Any] = _COMMON | {
    "architectures": ["ModernBertModel"], "model_type": "modernbert", "global_attn_every_n_layers": 2,
    "global_rope_theta": 160000.0, "hidden_activation": "gelu", "local_attention": 32, "local_rope_theta": 10000.0,
    "max_position_embeddings": 256, "norm_eps": 1e-5, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 3, "sep_token_id": 2,
}  # fmt: skip
QWEN3: dict[str, Any] = _COMMON | {
    "architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3", "head_dim": 16, "hidden_act": "silu",
    "max_position_embeddings": 256, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
YES, NO = 17, 90


@dataclass(frozen=True)
class Encoder:
    """A model, and the folders and files of sentence-transformers beside its configuration."""

    config: dict[str, Any]
    shapes: Shapes
    modules: dict[str, dict[str, Any]]
    """Module -> its configuration; empty: the folder has no modules.json."""
    pooling: str
    """last, cls or mean."""

    @property
    def is_reranker(self) -> bool:
        return self.config["architectures"][0].endswith("Classification") or "LogitScore" in self.modules

    @property
    def num_types(self) -> int:
        return int(self.config.get("type_vocab_size", 1))


def _linear(name: str, rows: int, columns: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _norm(name: str, width: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (width,)} | ({f"{name}.bias": (width,)} if bias else {})


def _bert(config: dict[str, Any], prefix: str = "", head: Shapes | None = None) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {
        "embeddings.word_embeddings.weight": (VOCAB, hidden),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], hidden),
        **_norm("embeddings.LayerNorm", hidden),
    }
    for index in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{index}."
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _linear(f"{at}attention.{name}", hidden, hidden)
        shapes |= _norm(f"{at}attention.output.LayerNorm", hidden) | _norm(f"{at}output.LayerNorm", hidden)
        shapes |= _linear(f"{at}intermediate.dense", inner, hidden) | _linear(f"{at}output.dense", hidden, inner)
    return {prefix + name: shape for name, shape in shapes.items()} | (head or {})


def _modernbert(config: dict[str, Any], prefix: str = "", head: Shapes | None = None) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {"embeddings.tok_embeddings.weight": (VOCAB, hidden), **_norm("embeddings.norm", hidden, False)}
    for index in range(config["num_hidden_layers"]):
        at = f"layers.{index}."
        shapes |= _norm(f"{at}attn_norm", hidden, False) if index else {}
        shapes |= _linear(f"{at}attn.Wqkv", 3 * hidden, hidden, False) | _linear(f"{at}attn.Wo", hidden, hidden, False)
        shapes |= _norm(f"{at}mlp_norm", hidden, False) | _linear(f"{at}mlp.Wi", 2 * inner, hidden, False)
        shapes |= _linear(f"{at}mlp.Wo", hidden, inner, False)
    shapes |= _norm("final_norm", hidden, False)
    return {prefix + name: shape for name, shape in shapes.items()} | (head or {})


def _qwen3(config: dict[str, Any], head: Shapes) -> Shapes:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        for name, heads in (("q", config["num_attention_heads"]), ("k", 1), ("v", 1)):
            shapes |= _linear(f"{at}self_attn.{name}_proj", heads * dim, hidden, False)
        shapes |= _linear(f"{at}self_attn.o_proj", hidden, config["num_attention_heads"] * dim, False)
        shapes |= {f"{at}self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{name}.weight"] = (hidden,)
        for name, sizes in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            shapes |= _linear(f"{at}mlp.{name}_proj", *sizes, False)
    return shapes | head


def models() -> dict[str, Encoder]:
    hidden = _COMMON["hidden_size"]

    def classifier(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
        name = config["architectures"][0].replace("Model", "ForSequenceClassification")
        return config | {"architectures": [name]} | changes

    def pooled(**pooling: Any) -> dict[str, dict[str, Any]]:
        return {"Transformer": {}, "Pooling": pooling, "Normalize": {}}

    of_bert = _linear("pooler.dense", hidden, hidden)
    bert_head = _linear("bert.pooler.dense", hidden, hidden) | _linear("classifier", 1, hidden)
    roberta_head = _linear("classifier.dense", hidden, hidden) | _linear("classifier.out_proj", 1, hidden)
    modern_head = _linear("head.dense", hidden, hidden, False) | _norm("head.norm", hidden, False)
    modern_head |= _linear("classifier", 1, hidden)
    modern_config = classifier(MODERNBERT, classifier_pooling="mean")
    causal = QWEN3 | {"architectures": ["Qwen3ForCausalLM"]}
    by_logits: dict[str, dict[str, Any]] = {
        "Transformer": {},
        "LogitScore": {"true_token_id": YES, "false_token_id": NO},
    }
    made = {
        "bert": (BERT, _bert(BERT, head=of_bert), pooled(pooling_mode_mean_tokens=True), "mean"),
        "bert-reranker": (classifier(BERT), _bert(BERT, "bert.", bert_head), {}, "cls"),
        "xlm-roberta": (XLM_ROBERTA, _bert(XLM_ROBERTA), pooled(pooling_mode_cls_token=True), "cls"),
        "xlm-roberta-reranker": (classifier(XLM_ROBERTA), _bert(XLM_ROBERTA, "roberta.", roberta_head), {}, "cls"),
        "modernbert": (MODERNBERT, _modernbert(MODERNBERT), pooled(pooling_mode="mean"), "mean"),
        "modernbert-reranker": (modern_config, _modernbert(MODERNBERT, "model.", modern_head), {}, "mean"),
        "qwen3-reranker": (QWEN3, _qwen3(QWEN3, _linear("score", 1, hidden, False)), {}, "last"),
        "qwen3-yes-no": (causal, _qwen3(causal, {}), by_logits, "last"),
    }
    return {name: Encoder(*each) for name, each in made.items()}


def weights(name: str) -> dict[str, np.ndarray]:
    """Return the float32 tensors of a model: matrices scaled to preserve row norms, norm weights around one."""
    tensors = {}
    for tensor, shape in models()[name].shapes.items():
        drawn = bell(f"{name} {tensor}", shape)
        is_norm = "norm" in tensor.lower() and tensor.endswith("weight")
        scale = 0.2 if len(shape) == 1 else 1.0 if "embed" in tensor else 1.5 * shape[-1] ** -0.5
        tensors[tensor] = (drawn * scale + is_norm).astype(np.float32)
    return tensors


def prompt(name: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids and types of a text. With two types, the last third has type 1."""
    ids = integers(f"{name} {length}", length, 4, VOCAB)
    types = (np.arange(length) >= length * 2 // 3 + 1) * (models()[name].num_types > 1)
    return ids, types.astype(np.int32)


def write(name: str, folder: Path) -> None:
    """Write the model folder in the published layout."""
    model = models()[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config))
    save_file(weights(name), folder / "model.safetensors", metadata={"format": "pt"})
    if not model.modules:
        return
    listed = []
    for index, (kind, config) in enumerate(model.modules.items()):
        place = "" if kind == "Transformer" else f"{index}_{kind}"
        listed.append({"idx": index, "name": str(index), "path": place, "type": f"sentence_transformers.models.{kind}"})
        if place:
            (folder / place).mkdir(exist_ok=True)
            (folder / place / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(listed))


def golden(name: str) -> dict[int, np.ndarray]:
    """Return the vector or the score of each text, by its number of tokens."""
    stored = load_file(GOLDEN)
    return {length: stored[f"{name} {length}"] for length in LENGTHS}


def _by_transformers(name: str, folder: Path, length: int) -> np.ndarray:
    import torch
    import transformers

    model, (ids, types) = models()[name], prompt(name, length)
    given = {"input_ids": torch.tensor(ids)[None].long(), "attention_mask": torch.ones(1, length).long()}
    if model.num_types > 1:
        given["token_type_ids"] = torch.tensor(types)[None].long()
    kind = getattr(transformers, model.config["architectures"][0])
    loaded = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        result = loaded(**given)
    if "LogitScore" in model.modules:
        logits = result.logits[0, -1]
        return (logits[YES] - logits[NO])[None].numpy()
    if model.is_reranker:
        return result.logits[0].numpy()
    states = result.last_hidden_state[0].double()
    pooled = states.mean(0) if model.pooling == "mean" else states[0] if model.pooling == "cls" else states[-1]
    return pooled.float().numpy()


def main() -> None:
    import tempfile

    stored = {}
    for name in models():
        with tempfile.TemporaryDirectory() as folder:
            write(name, Path(folder))
            for length in LENGTHS:
                stored[f"{name} {length}"] = _by_transformers(name, Path(folder), length)
    save_file(stored, GOLDEN)


if __name__ == "__main__":
    main()
