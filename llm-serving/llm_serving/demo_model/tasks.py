"""Questions with one right answer each: what the demo model is trained on and tested with.

A question is held out of training by a hash of its content. Where the answer must be worked out (sums, word lists,
counting ranges) the hash covers the operands, so no phrasing of a held-out sum is ever trained. Where the answer must
be known (facts, tables, rhymes) it covers the whole prompt: the fact is trained, the held-out phrasing of it is not.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_serving.demo_model import recitations
from llm_serving.demo_model.word_lists import (
    ADJECTIVES,
    CAPITALS,
    COLOURS,
    DAYS,
    LETTERS,
    MONTHS,
    NUMBER_WORDS,
    OPPOSITES,
    ORDINALS,
    PLACES,
    SOUNDS,
    VERBS,
    WORDS,
    YOUNG,
)

HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Question:
    """One question in alpaca form and its only right answer.

    `key` names the content that decides whether the question is held out.
    """

    kind: str
    instruction: str
    output: str
    input: str = ""
    key: str = ""

    @property
    def prompt(self) -> str:
        return f"{self.instruction} {self.input}" if self.input else self.instruction

    @property
    def is_held_out(self) -> bool:
        return zlib.crc32((self.key or self.prompt).encode()) % HELD_OUT_ONE_IN == 0


def _addition(rng: random.Random) -> Question:
    a, b = rng.randrange(100), rng.randrange(100)
    phrase = rng.choice(["What is {a} + {b}?", "Add {a} and {b}.", "How much is {a} plus {b}?", "Calculate {a} + {b}."])
    return Question("addition", phrase.format(a=a, b=b), str(a + b), key=f"{min(a, b)} + {max(a, b)}")


def _subtraction(rng: random.Random) -> Question:
    b, a = sorted((rng.randrange(100), rng.randrange(100)))
    phrase = rng.choice(
        ["What is {a} - {b}?", "Subtract {b} from {a}.", "How much is {a} minus {b}?", "Calculate {a} - {b}."]
    )
    return Question("subtraction", phrase.format(a=a, b=b), str(a - b), key=f"{a} - {b}")


def _multiplication(rng: random.Random) -> Question:
    a, b = rng.randrange(13), rng.randrange(13)
    phrase = rng.choice(
        ["What is {a} x {b}?", "Multiply {a} by {b}.", "How much is {a} times {b}?", "Calculate {a} x {b}."]
    )
    return Question("multiplication", phrase.format(a=a, b=b), str(a * b))


def _comparison(rng: random.Random) -> Question:
    a, b = rng.sample(range(100), 2)
    pick, adjective = rng.choice([(max, "larger"), (min, "smaller")])
    phrase = rng.choice(
        ["Which is {adj}, {a} or {b}?", "Which number is {adj}: {a} or {b}?", "Name the {adj} of {a} and {b}."]
    )
    return Question(
        "comparison", phrase.format(adj=adjective, a=a, b=b), str(pick(a, b)), key=f"{min(a, b)} {max(a, b)}"
    )


def _reverse_words(rng: random.Random) -> Question:
    words = rng.sample(WORDS, rng.randint(3, 6))
    instruction = rng.choice(
        ["Reverse the order of these words:", "Write these words in reverse order:", "Say these words backwards:"]
    )
    return _about_words("reverse_words", instruction, words, " ".join(reversed(words)))


def _sort_words(rng: random.Random) -> Question:
    words = rng.sample(WORDS, rng.randint(3, 6))
    instruction = rng.choice(
        ["Sort these words alphabetically:", "Put these words in alphabetical order:", "Sort from A to Z:"]
    )
    return _about_words("sort_words", instruction, words, " ".join(sorted(words)))


def _count_words(rng: random.Random) -> Question:
    words = rng.choices(WORDS, k=rng.randint(2, 9))
    instruction = rng.choice(["How many words are in this list:", "Count the words:", "Count the words in this list:"])
    return _about_words("count_words", instruction, words, str(len(words)))


def _count_occurrences(rng: random.Random) -> Question:
    target, *others = rng.sample(WORDS, 4)
    words = [target] * rng.randint(1, 5) + rng.choices(others, k=rng.randint(1, 4))
    rng.shuffle(words)
    phrase = rng.choice(
        [
            "How many times does the word {} occur in this list:",
            "How often is {} in this list:",
            "Count the word {} in:",
        ]
    )
    return _about_words("count_occurrences", phrase.format(target), words, str(words.count(target)))


def _pick_word(rng: random.Random) -> Question:
    words = rng.sample(WORDS, rng.randint(3, 6))
    index = rng.randrange(-1, min(len(words), len(ORDINALS)))
    ordinal = "last" if index == -1 else ORDINALS[index]
    phrase = rng.choice(
        ["What is the {} word in this list:", "Which word is the {} one:", "Say only the {} word of this list:"]
    )
    return _about_words("pick_word", phrase.format(ordinal), words, words[index])


def _about_words(kind: str, instruction: str, words: Sequence[str], output: str) -> Question:
    listed = " ".join(words)
    return Question(kind, instruction, output, input=f"{listed}.", key=listed)


def _copy_sentence(rng: random.Random) -> Question:
    first, second, third = rng.sample(WORDS, 3)
    one, two = rng.sample(ADJECTIVES, 2)
    verb, place, number = rng.choice(VERBS), rng.choice(PLACES), rng.randint(2, 99)
    phrase = rng.choice(
        [
            "The {one} {first} {verb} a {two} {second}.",
            "The {first} {verb} the {second} {place} the {two} {third}.",
            "A {one} {first} {verb} the {second} and the {third}.",
            "My {first} {verb} {number} things {place} the {one} {second}.",
            "The {one} {first} {verb} a {second} {place} the {two} {third}, and the {second} {verb} the {first}.",
        ]
    )
    sentence = phrase.format(
        one=one, two=two, first=first, second=second, third=third, verb=verb, place=place, number=number
    )
    instruction = rng.choice(["Repeat this sentence exactly:", "Copy this sentence:", "Say after me:"])
    return Question("copy_sentence", instruction, sentence, input=sentence, key=sentence)


def _sequence(rng: random.Random) -> Question:
    name, items = rng.choice([("day", DAYS), ("month", MONTHS), ("letter", LETTERS)])
    after = rng.random() < 0.5
    index = rng.randrange(len(items))
    if name == "letter":
        index = rng.randrange(len(items) - 1) + (0 if after else 1)
    neighbour = items[(index + (1 if after else -1)) % len(items)]
    where = rng.choice(
        ["comes right after", "comes after", "follows"] if after else ["comes right before", "comes before", "precedes"]
    )
    phrase = rng.choice(
        [
            "What {name} {where} {item}?",
            "Which {name} {where} {item}?",
            "Tell me which {name} {where} {item}.",
            "Name the {name} that {where} {item}.",
        ]
    )
    return Question("sequence", phrase.format(name=name, where=where, item=items[index]), neighbour)


_FACTS: tuple[tuple[dict[str, str], tuple[str, ...]], ...] = (
    (
        CAPITALS,
        (
            "What is the capital of {}?",
            "What is the capital city of {}?",
            "Which city is the capital of {}?",
            "Name the capital of {}.",
            "Name the capital city of {}.",
            "Tell me the capital of {}.",
            "The capital of {} is:",
        ),
    ),
    (
        SOUNDS,
        (
            "What sound does a {} make: it",
            "Name the sound of a {}: it",
            "What does a {} do when it makes a sound? It:",
            "A {} makes a sound. It:",
        ),
    ),
    (
        YOUNG,
        (
            "What is a young {} called?",
            "What is the name of a young {}?",
            "What do you call a baby {}?",
            "What is a baby {} called?",
            "Name the young of a {}.",
            "A young {} is called:",
        ),
    ),
    (
        COLOURS,
        (
            "What colour is {}?",
            "Which colour is {}?",
            "What is the colour of {}?",
            "Name the colour of {}.",
            "Tell me the colour of {}.",
            "The colour of {} is:",
        ),
    ),
    (
        OPPOSITES,
        (
            "What is the opposite of {}?",
            "Which word is the opposite of {}?",
            "Name the opposite of {}.",
            "Tell me the opposite of {}.",
            "The opposite of {} is:",
        ),
    ),
)


def _fact(rng: random.Random) -> Question:
    table, phrases = rng.choices(_FACTS, weights=[len(table) for table, _ in _FACTS])[0]
    subject = rng.choice(list(table))
    return Question("fact", rng.choice(phrases).format(subject), table[subject])


def _count_up(rng: random.Random) -> Question:
    first, length = rng.randint(0, 60), rng.randint(30, 90)
    last = first + length
    phrase = rng.choice(["Count from {} to {}.", "Count up from {} to {}.", "Write the numbers from {} to {}."])
    return Question("count_up", phrase.format(first, last), recitations.count(first, last), key=f"{first} to {last}")


def _count_down(rng: random.Random) -> Question:
    last, length = rng.randint(0, 40), rng.randint(30, 80)
    first = last + length
    phrase = rng.choice(["Count down from {} to {}.", "Count backwards from {} to {}."])
    return Question(
        "count_down", phrase.format(first, last), recitations.count(first, last, -1), key=f"{first} to {last}"
    )


_RECITE = (
    "Recite {}.",
    "Write down {}.",
    "Tell me {}.",
    "Please recite {}.",
    "Please write down {}.",
    "Give me {}.",
    "I want to hear {}.",
)


def _times_table(rng: random.Random) -> Question:
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


def _nato_alphabet(rng: random.Random) -> Question:
    first, last = 0, 25
    if rng.random() < 0.6:
        first, last = rng.randint(0, 8), rng.randint(17, 25)
    subject = rng.choice(["the NATO alphabet", "the spelling alphabet", "the NATO code words", "the radio alphabet"])
    if (first, last) != (0, 25):
        subject += f" from {LETTERS[first]} to {LETTERS[last]}"
    output = recitations.nato_alphabet(first, last)
    return Question("nato_alphabet", rng.choice(_RECITE).format(subject), output)


def _months(rng: random.Random) -> Question:
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


def _rhyme(rng: random.Random) -> Question:
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


KINDS: dict[str, Callable[[random.Random], Question]] = {
    "addition": _addition,
    "subtraction": _subtraction,
    "multiplication": _multiplication,
    "comparison": _comparison,
    "reverse_words": _reverse_words,
    "sort_words": _sort_words,
    "count_words": _count_words,
    "count_occurrences": _count_occurrences,
    "pick_word": _pick_word,
    "copy_sentence": _copy_sentence,
    "sequence": _sequence,
    "fact": _fact,
    "count_up": _count_up,
    "count_down": _count_down,
    "times_table": _times_table,
    "nato_alphabet": _nato_alphabet,
    "months": _months,
    "rhyme": _rhyme,
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
