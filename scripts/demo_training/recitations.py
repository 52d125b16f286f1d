"""Questions for recitations: answers of up to five hundred tokens that follow from a few parameters."""

import random
from collections.abc import Sequence

from demo_training.question import LETTERS, MONTH_DAYS, MONTHS, NATO, NUMBER_WORDS, Question


def count_text(first: int, last: int) -> str:
    """Return the numbers from `first` to `last` inclusive, ascending or descending, separated by commas."""
    step = 1 if last >= first else -1
    return ", ".join(str(number) for number in range(first, last + step, step))


def times_table_text(number: int) -> str:
    """Return the twenty lines of one multiplication table."""
    return "\n".join(f"{factor} x {number} = {factor * number}" for factor in range(1, 21))


def nato_alphabet_text(first: int, last: int) -> str:
    """Return the code words of the letters with indices `first` to `last` inclusive, one per line."""
    return "\n".join(f"{LETTERS[index]} as in {NATO[index]}" for index in range(first, last + 1))


def months_text(first: int, leap_year: bool) -> str:
    """Return the twelve months from index `first` on, each with its number and its days."""
    lines = []
    for offset in range(12):
        index = (first + offset) % 12
        days = MONTH_DAYS[index] + (1 if leap_year and index == 1 else 0)
        lines.append(f"{MONTHS[index]} is month {index + 1} and has {days} days")
    return "\n".join(lines)


def rhyme_text(start: int, singular: str, plural: str) -> str:
    """Return a countdown rhyme: one verse for each of `start` things (1 to 10) that the wind takes away.

    Args:
        start: Number of things in the first verse.
        singular: Name of one thing, such as "boat".
        plural: Name of several things, such as "boats".
    """

    def amount(number: int) -> str:
        return f"{NUMBER_WORDS[number]} little {singular if number == 1 else plural}"

    verses = [
        f"{amount(number).capitalize()} waiting by the bay,\n"
        "the wind came by and took one away,\n"
        f"and {amount(number - 1)} stayed to play."
        for number in range(start, 0, -1)
    ]
    return "\n".join(verses)


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
    return Question(kind, instruction, count_text(first, last), key=f"{first} to {last}")


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
    return Question("times_table", rng.choice(_RECITE).format(subject.format(number)), times_table_text(number))


def nato_alphabet(rng: random.Random) -> Question:
    first, last = 0, 25
    if rng.random() < 0.6:
        first, last = rng.randint(0, 8), rng.randint(17, 25)
    subject = rng.choice(["the NATO alphabet", "the spelling alphabet", "the NATO code words", "the radio alphabet"])
    if (first, last) != (0, 25):
        subject += f" from {LETTERS[first]} to {LETTERS[last]}"
    output = nato_alphabet_text(first, last)
    return Question("nato_alphabet", rng.choice(_RECITE).format(subject), output)


def months(rng: random.Random) -> Question:
    first, leap_year = rng.randrange(12), rng.random() < 0.5
    subject = rng.choice(
        ["the months and their days", "the twelve months with their days", "how many days each month has"]
    )
    year = "in a leap year" if leap_year else "in a common year"
    instruction = rng.choice(_RECITE).format(f"{subject} {year}, beginning with {MONTHS[first]}")
    return Question("months", instruction, months_text(first, leap_year))


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
    return Question("rhyme", instruction, rhyme_text(start, singular, plural))
