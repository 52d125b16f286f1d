"""Questions that ask for something to be recited, most of it long."""

import random
from collections.abc import Sequence

from llm_serving.demo_model import recitations
from llm_serving.demo_model.question import Question
from llm_serving.demo_model.word_lists import LETTERS, MONTHS, NUMBER_WORDS

_UP = ("Count from {} to {}.", "Count up from {} to {}.", "Write the numbers from {} to {}.")
_DOWN = ("Count down from {} to {}.", "Count backwards from {} to {}.")


def count_up(rng: random.Random) -> Question:
    first, length = rng.randint(0, 60), rng.randint(30, 90)
    return _count(rng, "count_up", _UP, first, first + length)


def count_down(rng: random.Random) -> Question:
    last, length = rng.randint(0, 40), rng.randint(30, 80)
    return _count(rng, "count_down", _DOWN, last + length, last)


def short_count(rng: random.Random) -> Question:
    first, length = rng.randint(0, 138), rng.randint(1, 12)
    if rng.random() < 0.5:
        return _count(rng, "short_count", _UP, first, first + length)
    return _count(rng, "short_count", _DOWN, first + length, first)


def _count(rng: random.Random, kind: str, phrases: Sequence[str], first: int, last: int) -> Question:
    instruction = rng.choice(phrases).format(first, last)
    return Question(kind, instruction, recitations.count(first, last), key=f"{first} to {last}")


_RECITE = (
    "Recite {}.",
    "Write down {}.",
    "Tell me {}.",
    "Please recite {}.",
    "Please write down {}.",
    "Give me {}.",
    "I want to hear {}.",
)


def times_table(rng: random.Random) -> Question:
    number = rng.randint(2, 20)
    subject = rng.choice(
        [
            "the times table of {}",
            "the multiplication table of {}",
            "the {} times table",
            "all twenty lines of the times table of {}",
        ]
    )
    return Question("times_table", rng.choice(_RECITE).format(subject.format(number)), recitations.times_table(number))


def nato_alphabet(rng: random.Random) -> Question:
    first, last = 0, 25
    if rng.random() < 0.6:
        first, last = rng.randint(0, 8), rng.randint(17, 25)
    subject = rng.choice(["the NATO alphabet", "the spelling alphabet", "the NATO code words", "the radio alphabet"])
    if (first, last) != (0, 25):
        subject += f" from {LETTERS[first]} to {LETTERS[last]}"
    output = recitations.nato_alphabet(first, last)
    return Question("nato_alphabet", rng.choice(_RECITE).format(subject), output)


def months(rng: random.Random) -> Question:
    first, leap_year = rng.randrange(12), rng.random() < 0.5
    subject = rng.choice(
        ["the months and their days", "the twelve months with their days", "how many days each month has"]
    )
    year = "in a leap year" if leap_year else "in a common year"
    instruction = rng.choice(_RECITE).format(f"{subject} {year}, beginning with {MONTHS[first]}")
    return Question("months", instruction, recitations.months(first, leap_year))


_RHYME_THINGS = (
    ("boat", "boats"),
    ("bird", "birds"),
    ("cloud", "clouds"),
    ("duck", "ducks"),
    ("kite", "kites"),
    ("lamp", "lamps"),
    ("leaf", "leaves"),
    ("ship", "ships"),
    ("star", "stars"),
    ("hat", "hats"),
)


def rhyme(rng: random.Random) -> Question:
    start = rng.randint(5, 10)
    singular, plural = rng.choice(_RHYME_THINGS)
    number = rng.choice([str(start), NUMBER_WORDS[start]])
    subject = rng.choice(
        [
            "the rhyme of {} little {}",
            "the rhyme about {} little {}",
            "the poem of {} little {}",
            "the song of {} little {}",
        ]
    )
    instruction = rng.choice(_RECITE).format(subject.format(number, plural))
    return Question("rhyme", instruction, recitations.rhyme(start, singular, plural))
