"""The kinds of questions the demo model answers, and drawing questions of them."""

import random
from collections.abc import Callable, Sequence

from llm_serving.demo_model import arithmetic, facts, recitation_tasks, word_tasks
from llm_serving.demo_model.question import Question

KINDS: dict[str, Callable[[random.Random], Question]] = {
    "addition": arithmetic.addition,
    "subtraction": arithmetic.subtraction,
    "multiplication": arithmetic.multiplication,
    "comparison": arithmetic.comparison,
    "reverse_words": word_tasks.reverse_words,
    "sort_words": word_tasks.sort_words,
    "count_words": word_tasks.count_words,
    "pick_word": word_tasks.pick_word,
    "copy_sentence": word_tasks.copy_sentence,
    "sequence": facts.sequence,
    "fact": facts.fact,
    "short_count": recitation_tasks.short_count,
    "count_up": recitation_tasks.count_up,
    "count_down": recitation_tasks.count_down,
    "times_table": recitation_tasks.times_table,
    "nato_alphabet": recitation_tasks.nato_alphabet,
    "months": recitation_tasks.months,
    "rhyme": recitation_tasks.rhyme,
}

LONG_KINDS = ("count_up", "count_down", "times_table", "nato_alphabet", "months", "rhyme")
SHORT_KINDS = tuple(kind for kind in KINDS if kind not in LONG_KINDS)


def draw_question(rng: random.Random, kind: str, held_out: bool) -> Question:
    """Draws questions of one kind until one is on the wanted side of the split."""
    while True:
        question = KINDS[kind](rng)
        if question.is_held_out == held_out:
            return question


def generate_questions(
    seed: int, count: int, held_out: bool = True, kinds: Sequence[str] | None = None
) -> list[Question]:
    """Makes questions with their right answers, the kinds taking turns.

    A question comes twice only where its kind has few, such as the months.

    Args:
        seed: The same seed gives the same questions.
        count: How many.
        held_out: Whether they come from the part that training never saw, or from the part it did.
        kinds: Names from `KINDS`; all of them when None.

    Raises:
        ValueError: A name in `kinds` is unknown.
    """
    chosen = list(KINDS) if kinds is None else list(kinds)
    for kind in chosen:
        if kind not in KINDS:
            raise ValueError(f"`kinds` must be among {', '.join(KINDS)}. Given: {kind}")
    rng = random.Random(seed)
    questions: list[Question] = []
    seen: set[str] = set()
    for index in range(count):
        kind = chosen[index % len(chosen)]
        for _ in range(100):
            question = draw_question(rng, kind, held_out)
            if question.prompt not in seen:
                break
        seen.add(question.prompt)
        questions.append(question)
    return questions


def question_set() -> list[Question]:
    """The questions of `questions.json`: held out, balanced over the kinds, long ones among them."""
    questions = generate_questions(22, 28 * len(SHORT_KINDS), kinds=SHORT_KINDS)
    questions += generate_questions(22, 12 * len(LONG_KINDS), kinds=LONG_KINDS)
    random.Random(22).shuffle(questions)
    return questions
