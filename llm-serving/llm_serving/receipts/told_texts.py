"""The texts of an answer that its receipt came with: they may have been altered, and the receipt not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any


def told_texts(answer: Mapping[str, Any]) -> dict[int, str]:
    """Index of each choice whose text is in one piece -> that text; thoughts and calls are cut out of theirs."""
    choices = answer.get("choices")
    return dict(_texts(choices)) if isinstance(choices, list) else {}


def _texts(choices: list[Any]) -> Iterator[tuple[int, str]]:
    for position, choice in enumerate(choices):
        if not isinstance(choice, dict):
            continue
        index, text, message = choice.get("index", position), choice.get("text"), choice.get("message")
        if isinstance(message, dict) and not message.get("tool_calls") and not message.get("reasoning_content"):
            text = message.get("content")
        if isinstance(text, str) and isinstance(index, int):
            yield index, text


def is_text_of(text: str, prompt: str, text_hash: str) -> bool:
    """Whether it is the text with this SHA-256, behind an end of the prompt where it tells that again (`echo`)."""
    return any(
        prompt.endswith(text[:k]) and hashlib.sha256(text[k:].encode()).hexdigest() == text_hash
        for k in range(min(len(text), len(prompt)) + 1)
    )
