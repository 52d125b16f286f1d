"""What the tokens of a tokenizer are to its model: which ones end a text, and which it does not know."""

from __future__ import annotations

import json
from pathlib import Path

from llm_serving.config.sections.model import ModelConfig
from llm_serving.core.generation_defaults import GENERATION_CONFIG, generation_end_ids
from llm_serving.models.spec import CONFIG_NAME, ModelSpec
from llm_serving.text.tokenizer import Tokenizer


def notice_of_unknown_tokens(tokenizer: Tokenizer, vocab_size: int) -> str | None:
    """A sentence where the tokenizer has tokens that the model has not, as marks of pictures; None: it has none."""
    count = tokenizer.vocab_size - vocab_size
    if count <= 0:
        return None
    first = json.dumps(tokenizer.token_text(vocab_size), ensure_ascii=False)
    return (
        f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}: a prompt with one of the last "
        f"{count}, {first} the first of them, is refused"
    )


def describe_end_tokens(model: ModelConfig, tokenizer: Tokenizer) -> list[str]:
    """A line for each: id, text, and the files that name it; the same ids end the texts of requests.

    Raises:
        ModelError: A file of the model cannot be read.
    """
    folder = model.model_path
    assert folder is not None
    return [
        f"{token_id} {json.dumps(tokenizer.token_text(token_id), ensure_ascii=False)} ({', '.join(names)})"
        for token_id, names in _sources(model, folder, tokenizer).items()
    ] or ["nothing but its length"]


def _sources(model: ModelConfig, folder: Path, tokenizer: Tokenizer) -> dict[int, list[str]]:
    own = ModelSpec.from_folder(folder).eos_token_ids
    generation = generation_end_ids(folder)
    configured = [] if model.end_token is None or model.end_token in own else [model.end_token]
    names: dict[int, list[str]] = {}
    for name, ids in (
        ("model_config.end_token", configured),
        (CONFIG_NAME, own),
        (GENERATION_CONFIG, generation),
        ("tokenizer", () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)),
    ):
        for token_id in ids:
            names.setdefault(token_id, []).append(name)
    return names
