"""What the tokens of a tokenizer are to its model: which ones end a text, and which it does not know."""

from __future__ import annotations

import json
from pathlib import Path

from llm_serving.config.sections.model import ModelConfig
from llm_serving.core.generation_defaults import GENERATION_CONFIG, generation_end_ids
from llm_serving.errors import ModelError
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


def check_draft_vocabulary(tokenizer: Tokenizer, draft_model_path: Path) -> None:
    """Compares each token of a draft model with the model's: ids are what they tell each other.

    Raises:
        ModelError: One is another, or the draft model has no tokenizer.
    """
    draft = Tokenizer.load(draft_model_path)
    rule = f"scheduler_config.draft_model_path: {draft_model_path} must have the vocabulary of the model"
    if draft.vocab_size != tokenizer.vocab_size:
        raise ModelError(f"{rule}, {tokenizer.vocab_size} tokens. Given: {draft.vocab_size}")
    for token_id in range(tokenizer.vocab_size):
        if draft.token_bytes(token_id) != tokenizer.token_bytes(token_id):
            wanted, given = (_quoted(each, token_id) for each in (tokenizer, draft))
            raise ModelError(f"{rule}, where token {token_id} is {wanted}. Given: {given}")
    if other := draft.special_token_ids ^ tokenizer.special_token_ids:
        token_id = min(other)
        kind = "a special token" if token_id in tokenizer.special_token_ids else "no special token"
        raise ModelError(f"{rule}, where token {token_id}, {_quoted(tokenizer, token_id)}, is {kind}")
    if (size := ModelSpec.from_folder(draft_model_path).vocab_size) < tokenizer.vocab_size:
        raise ModelError(f"{rule}, {tokenizer.vocab_size} tokens. Given: weights for {size}")


def _quoted(tokenizer: Tokenizer, token_id: int) -> str:
    return json.dumps(tokenizer.token_text(token_id), ensure_ascii=False)


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
