"""How a text becomes a vector or a score, as `modules.json` of sentence-transformers and `config.json` specify."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from llm_serving.core.enums import PoolingMode
from llm_serving.core.files import read_json, read_json_object
from llm_serving.errors import ModelError, shorten
from llm_serving.formats.gguf import Gguf

if TYPE_CHECKING:
    from llm_serving.models.spec import ModelSpec

MODULES_NAME: Final = "modules.json"
MODULE_FILE: Final = re.compile(r"\d+_\w+/config\.json")
TRANSFORMER_FILE: Final = "sentence_bert_config.json"
_MAX_BYTES: Final = 2**20
_MAX_TOKENIZER_BYTES: Final = 2**28
_MAX_PLACE_CHARS: Final = 60
_MODE: Final = "pooling_mode_"
POOLING: Final = "pooling_mode"
_MODES: Final[Mapping[str, PoolingMode]] = {
    "lasttoken": PoolingMode.LAST,
    "cls": PoolingMode.FIRST,
    "cls_token": PoolingMode.FIRST,
    "mean": PoolingMode.MEAN,
    "mean_tokens": PoolingMode.MEAN,
}
_ACTIVATIONS: Final[Mapping[str, bool]] = {"Sigmoid": True, "Identity": False}
_ACTIVATION_KEYS: Final = ("activation_fn", "activation_function", "sbert_ce_default_activation_function")


_YES_NO_MODEL: Final = "qwen3-reranker"
"""Text in the path of a Qwen3-Reranker's folder, in lower case, as in `models--Qwen--Qwen3-Reranker-0.6B`."""
_YES_NO_FAMILY: Final = "Qwen3ForCausalLM"
_PAIR_TEMPLATES: Final[Mapping[str, str]] = {
    _YES_NO_FAMILY: (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
}


@dataclass(frozen=True, slots=True)
class Pooling:
    normalises: bool = True
    embedding_only: bool = False
    mode: PoolingMode = PoolingMode.LAST
    scores: bool = False
    """Whether the result is the score of a pair of texts instead of a vector."""
    applies_sigmoid: bool = True
    pair_template: str | None = None
    """Text of a pair, with `{query}` and `{document}`, for a decoder whose folder has no template for pairs."""

    @property
    def refusal(self) -> str:
        if self.scores:
            return "is a reranker, which answers only /v1/score and /rerank"
        return "is an embedding model, which answers only /v1/embeddings, /v1/score and /rerank"


def resolve_pooling(mode: str, folder: Path, spec: ModelSpec) -> Pooling | None:
    """Return the pooling for setting `mode`, or None without pooling. Raise ModelError if it is unsupported."""
    if mode == "none":
        return None
    if spec.network.num_labels:
        return _reranker(folder, spec)
    if mode == "last":
        return Pooling(embedding_only=is_embedding_model(folder) or not spec.network.causal)
    found = read_pooling(folder)
    if found is None and isinstance(spec.scheme, Gguf) and (stated := spec.config.get(POOLING)) is not None:
        found = Pooling(embedding_only=True, mode=_MODES[stated])
    if spec.network.causal:
        if found is not None and found.mode is not PoolingMode.LAST:
            rule = "is not supported for a decoder, only lasttoken; `model_config.pooling: last` pools the last token"
            raise ModelError(f"{folder}: pooling mode {found.mode} {rule}")
        return found
    # sentence-transformers pools an encoder without modules.json by mean.
    return found or Pooling(normalises=False, embedding_only=True, mode=PoolingMode.MEAN)


def pooling_mode(mode: str, folder: Path, spec: ModelSpec) -> PoolingMode:
    pooling = resolve_pooling(mode, folder, spec)
    return PoolingMode.LAST if pooling is None else pooling.mode


def is_embedding_model(folder: Path) -> bool:
    return (folder / MODULES_NAME).exists()


def read_pooling(folder: Path) -> Pooling | None:
    """Return the pooling of `modules.json`, or None without this file. Raise ModelError for an unsupported module."""
    modes, normalises = [], False
    for name, config in _modules(folder):
        if name == "Pooling":
            modes.append(_pooling_mode(config))
        elif name == "Normalize":
            normalises = True
        elif name != "Transformer":
            path = folder / MODULES_NAME
            raise ModelError(f"{path}: module {name} is not supported, only Transformer, Pooling and Normalize")
    if not is_embedding_model(folder):
        return None
    return Pooling(normalises, embedding_only=True, mode=modes[-1] if modes else PoolingMode.LAST)


def score_tokens(folder: Path, config: Mapping[str, Any]) -> list[int]:
    """Return the one or two ids of tokens from whose logits a reranker computes its score, or [] for other models.

    The score is the logit of the first token, minus the logit of the second if there are two. The ids are read from
    sentence-transformers' module LogitScore, or from `classifier_from_token` of config.json (vLLM), which lists the
    subtracted token first. Folders of Qwen3-Reranker of 2025 have neither; they are recognised by the model's name in
    their path.
    """
    if (texts := config.get("classifier_from_token")) is not None:
        return _token_ids(folder, texts)
    is_named = any(_YES_NO_MODEL in part.lower() for part in folder.absolute().parts)
    if is_named and config.get("architectures") == [_YES_NO_FAMILY] and not is_embedding_model(folder):
        return _token_ids(folder, ["no", "yes"])
    for name, path in _modules(folder):
        if name == "LogitScore":
            content = read_json(path, _MAX_BYTES)
            ids = [content.get(key) for key in ("true_token_id", "false_token_id")] if isinstance(content, dict) else []
            if not ids or not all(type(each) is int or (at == 1 and each is None) for at, each in enumerate(ids)):
                raise ModelError(f"{path}: must have an integer `true_token_id`. Given: {shorten(content)}")
            return [each for each in ids if each is not None]
    return []


def missing_module_files(folder: Path) -> list[str]:
    """Return the files that `modules.json` requires and the folder lacks. Raise ModelError if it is not valid."""
    needed = [path for name, path in _modules(folder) if name in ("Pooling", "LogitScore")]
    return [str(path.relative_to(folder)) for path in needed if not path.exists()]


def max_seq_length(folder: Path) -> int | None:
    """Return the context length limit of sentence-transformers in tokens, or None if the folder sets none."""
    path = folder / TRANSFORMER_FILE
    config = read_json(path, _MAX_BYTES) if path.exists() else None
    length = config.get("max_seq_length") if isinstance(config, Mapping) else None
    return length if type(length) is int and length > 0 else None


def _token_ids(folder: Path, texts: Any) -> list[int]:
    path = folder / "tokenizer.json"
    content = read_json(path, _MAX_TOKENIZER_BYTES) if path.exists() else {}
    model = content.get("model") if isinstance(content, Mapping) else None
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    known = vocab if isinstance(vocab, Mapping) else {}
    are_texts = isinstance(texts, list) and len(texts) == 2 and all(isinstance(each, str) for each in texts)
    if not are_texts or not all(type(known.get(each)) is int for each in texts):
        rule = "must hold two tokens of tokenizer.json, such as no and yes"
        raise ModelError(f"{folder}: `classifier_from_token` {rule}. Given: {shorten(texts)}")
    return [known[each] for each in reversed(texts)]


def _reranker(folder: Path, spec: ModelSpec) -> Pooling:
    """Return a classifier's pooling with its activation function. Raise ModelError for an unsupported function."""
    mode = PoolingMode.LAST
    if not spec.network.causal:
        pools_all = "ModernBert" in spec.architecture and spec.config.get("classifier_pooling") == PoolingMode.MEAN
        mode = PoolingMode.MEAN if pools_all else PoolingMode.FIRST
    own = spec.config.get("sentence_transformers")
    named = dict(own) if isinstance(own, Mapping) else {}
    named |= {key: spec.config.get(key) for key in _ACTIVATION_KEYS if isinstance(spec.config.get(key), str)}
    path = folder / "config_sentence_transformers.json"
    if path.exists() and isinstance(config := read_json(path, _MAX_BYTES), Mapping):
        named |= config
    activation = next((named[key] for key in _ACTIVATION_KEYS if isinstance(named.get(key), str)), "Sigmoid")
    kind = activation.rsplit(".", 1)[-1]
    if kind not in _ACTIVATIONS:
        raise ModelError(
            f"{folder}: activation function {shorten(activation)} is not supported, only Sigmoid and Identity"
        )
    return Pooling(
        False,
        embedding_only=True,
        mode=mode,
        scores=True,
        applies_sigmoid=_ACTIVATIONS[kind],
        pair_template=_PAIR_TEMPLATES.get(spec.architecture),
    )


def _modules(folder: Path) -> list[tuple[str, Path]]:
    path = folder / MODULES_NAME
    if not path.exists():
        return []
    modules = read_json(path, _MAX_BYTES)
    if not isinstance(modules, list):
        raise ModelError(f"{path}: must be a list of modules. Given: {shorten(modules)}")
    found = []
    for module in modules:
        place, kind = (module.get("path"), module.get("type")) if isinstance(module, dict) else (None, None)
        if not isinstance(place, str) or not isinstance(kind, str):
            raise ModelError(f"{path}: each module must have `path` and `type`. Given: {shorten(module)}")
        name = kind.rsplit(".", 1)[-1]
        is_beside = place not in (".", "..") and Path(place).name == place and len(place) <= _MAX_PLACE_CHARS
        if name != "Transformer" and not is_beside:
            raise ModelError(f"{path}: `path` of a module must name a folder beside it. Given: {shorten(place)}")
        found.append((name, folder / place / "config.json"))
    return found


def _pooling_mode(path: Path) -> PoolingMode:
    if not path.exists():
        raise ModelError(f"{path}, which {MODULES_NAME} names, is missing: it specifies how vectors are pooled")
    config = read_json_object(path, _MAX_BYTES)
    modes = [key.removeprefix(_MODE) for key, value in config.items() if key.startswith(_MODE) and value is True]
    if isinstance(named := config.get("pooling_mode"), str):
        modes = [named.removesuffix("_token")]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelError(
            f"{path}: pooling mode {' + '.join(modes) or 'none'} is not supported, only lasttoken, cls and mean; "
            f"set `model_config.pooling: last` to use the last token instead"
        )
    return _MODES[modes[0]]
