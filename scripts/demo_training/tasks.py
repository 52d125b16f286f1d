"""The kinds of questions that the demo model answers, and seeded sets of questions."""

import random
from collections.abc import Callable, Sequence

from demo_training import facts, recitations, word_tasks
from demo_training.question import Question


def addition(rng: random.Random) -> Question:
    a, b = rng.randrange(100), rng.randrange(100)
    phrase = rng.choice(["What is {a} + {b}?", "Add {a} and {b}.", "How much is {a} plus {b}?", "Calculate {a} + {b}."])
    return Question("addition", phrase.format(a=a, b=b), str(a + b), key=f"{min(a, b)} + {max(a, b)}")


def subtraction(rng: random.Random) -> Question:
    b, a = sorted((rng.randrange(100), rng.randrange(100)))
    phrase = rng.choice(
        ["What is {a} - {b}?", "Subtract {b} from {a}.", "How much is {a} minus {b}?", "Calculate {a} - {b}."]
    )
    return Question("subtraction", phrase.format(a=a, b=b), str(a - b), key=f"{a} - {b}")


def multiplication(rng: random.Random) -> Question:
    a, b = rng.randrange(13), rng.randrange(13)
    phrase = rng.choice(
        ["What is {a} x {b}?", "Multiply {a} by {b}.", "How much is {a} times {b}?", "Calculate {a} x {b}."]
    )
    return Question("multiplication", phrase.format(a=a, b=b), str(a * b))


def comparison(rng: random.Random) -> Question:
    a, b = rng.sample(range(100), 2)
    pick, adjective = rng.choice([(max, "larger"), (min, "smaller")])
    phrase = rng.choice(
        ["Which is {adj}, {a} or {b}?", "Which number is {adj}: {a} or {b}?", "Name the {adj} of {a} and {b}."]
    )
    return Question(
        "comparison", phrase.format(adj=adjective, a=a, b=b), str(pick(a, b)), key=f"{min(a, b)} {max(a, b)}"
    )


KINDS: dict[str, Callable[[random.Random], Question]] = {
    "addition": addition,
    "subtraction": subtraction,
    "multiplication": multiplication,
    "comparison": comparison,
    "reverse_words": word_tasks.reverse_words,
    "sort_words": word_tasks.sort_words,
    "count_words": word_tasks.count_words,
    "pick_word": word_tasks.pick_word,
    "copy_sentence": word_tasks.copy_sentence,
    "sequence": facts.sequence,
    "fact": facts.fact,
    "short_count": recitations.short_count,
    "count_up": recitations.count_up,
    "count_down": recitations.count_down,
    "times_table": recitations.times_table,
    "nato_alphabet": recitations.nato_alphabet,
    "months": recitations.months,
    "rhyme": recitations.rhyme,
}

LONG_KINDS = ("count_up", "count_down", "times_table", "nato_alphabet", "months", "rhyme")
SHORT_KINDS = tuple(kind for kind in KINDS if kind not in LONG_KINDS)


def draw_question(rng: random.Random, kind: str, held_out: bool) -> Question:
    """Draw questions of one kind until one is in the requested part of the split."""
    while True:
        question = KINDS[kind](rng)
        if question.is_held_out == held_out:
            return question


def generate_questions(
    seed: int, count: int, held_out: bool = True, kinds: Sequence[str] | None = None
) -> list[Question]:
    """Return questions with their right answers, one of each kind in turn.

    A question is repeated only if its kind has few, such as the months.

    Args:
        seed: Seed of the questions.
        count: Number of questions.
        held_out: Whether to draw from the held-out part instead of the training part.
        kinds: Names from `KINDS`; None: all.

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
    """Return the questions of `questions.json`: held out, balanced over the kinds, some with long answers."""
    questions = generate_questions(22, 28 * len(SHORT_KINDS), kinds=SHORT_KINDS)
    questions += generate_questions(22, 12 * len(LONG_KINDS), kinds=LONG_KINDS)
    random.Random(22).shuffle(questions)
    return questions
