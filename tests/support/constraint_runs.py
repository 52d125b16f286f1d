"""Models without arithmetic that keep to constraints."""

from __future__ import annotations

import random

import numpy as np
from llm_serving.core.constraint import Constraint
from support.fakes import DEMO_TOKENIZER

END = DEMO_TOKENIZER.eos_token_ids[0]


def allowed_ids(words: np.ndarray) -> list[int]:
    """The tokens of a mask."""
    found: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    return found


def random_answer(constraint: Constraint, choice: random.Random, max_tokens: int) -> str | None:
    """The text of a model that says any allowed token; None: it has not come to its end."""
    matcher, output = constraint.create_matcher(), list[int]()
    while len(output) < max_tokens:
        token_id = choice.choice(allowed_ids(matcher.allowed_words(output)))
        if token_id == END:
            return b"".join(map(DEMO_TOKENIZER.token_bytes, output)).decode()
        output.append(token_id)
    return None
