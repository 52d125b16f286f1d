"""A model that calls a tool as Qwen does, and the input of its chat template."""

from __future__ import annotations

import json
from typing import Any

from llm_serving.text.tokenizer.sentencepiece import SentencePieceVocabulary
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from support.fakes import DEMO_FOLDER, FakeEngine

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zurich"}}\n</tool_call>'
ARGUMENTS = '{"city": "Zurich"}'
HERMES = "{{ messages | tojson }}{{ tools | tojson }}{# <tool_call> <think></think> #}"
"""A template that renders all its input, for a model that calls tools as Qwen does and reasons before it answers."""


def tokenizer_with(template: str) -> Tokenizer:
    vocabulary = SentencePieceVocabulary(DEMO_FOLDER / "tokenizer.model", {})
    return Tokenizer(vocabulary, {}, chat_templates={"default": template})


def prompt_of(engine: FakeEngine, index: int = 0) -> Any:
    """Return the messages and tools that the template received."""
    text = engine.tokenizer.decode(engine.submitted[index].prompt_token_ids)
    messages, end = json.JSONDecoder().raw_decode(text)
    return messages, json.loads(text[end:])
