"""Random answers that fulfil constraints, without a model."""

from __future__ import annotations

import random

import numpy as np
from llm_serving.core.request import Constraint
from support.fakes import DEMO_TOKENIZER

END = DEMO_TOKENIZER.eos_token_ids[0]


def allowed_ids(words: np.ndarray) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    return found


def random_answer(constraint: Constraint, choice: random.Random, max_tokens: int) -> str | None:
    """Return the text of randomly chosen allowed tokens; None if it is not complete after `max_tokens`."""
    matcher, output = constraint.create_matcher(), list[int]()
    while len(output) < max_tokens:
        token_id = choice.choice(allowed_ids(matcher.allowed_words(output)))
        if token_id == END:
            return b"".join(map(DEMO_TOKENIZER.token_bytes, output)).decode()
        output.append(token_id)
    return None
