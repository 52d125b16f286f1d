"""Questions about small numbers."""

import random

from llm_serving.demo_model.question import Question


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
