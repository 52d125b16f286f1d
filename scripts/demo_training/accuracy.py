"""Share of held-out questions that a model answers exactly."""

from collections.abc import Sequence

import torch

from demo_training.batches import make_batch
from demo_training.network import Llama
from demo_training.question import Question
from demo_training.tasks import LONG_KINDS, SHORT_KINDS, generate_questions
from demo_training.tokenizer import Encoder


@torch.no_grad()
def accuracy(model: Llama, encoder: Encoder, questions: Sequence[Question]) -> dict[str, float]:
    """Return the share of questions of each kind whose greedy answer is exact, between 0.0 and 1.0.

    Greedy decoding gives the right answer if and only if, after every prefix of it, its next token is the most likely
    one. So one forward pass over the right answer is sufficient.
    """
    exact: dict[str, list[bool]] = {}
    for first in range(0, len(questions), 128):
        part = questions[first : first + 128]
        batch = make_batch([encoder.encode(question) for question in part])
        hits = model(batch).argmax(-1) == batch.targets
        wrong = set(batch.owners[~hits].tolist())
        for index, question in enumerate(part):
            exact.setdefault(question.kind, []).append(index not in wrong)
    return {kind: sum(results) / len(results) for kind, results in exact.items()}


def held_out_questions(seed: int, short: int, long: int) -> list[Question]:
    """Return `short` held-out questions of each kind with short answers, and `long` of each kind with long ones."""
    questions = generate_questions(seed, short * len(SHORT_KINDS), kinds=SHORT_KINDS)
    return questions + generate_questions(seed, long * len(LONG_KINDS), kinds=LONG_KINDS)
