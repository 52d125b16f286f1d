"""Questions about a list of words."""

import random
from collections.abc import Sequence

from demo_training.question import ADJECTIVES, ORDINALS, PREPOSITIONS, VERBS, WORDS, Question


def reverse_words(rng: random.Random) -> Question:
    words = rng.sample(WORDS, rng.randint(3, 6))
    instruction = rng.choice(
        ["Reverse the order of these words:", "Write these words in reverse order:", "Say these words backwards:"]
    )
    return _about_words("reverse_words", instruction, words, " ".join(reversed(words)))


def sort_words(rng: random.Random) -> Question:
    words = rng.sample(WORDS, rng.randint(3, 6))
    instruction = rng.choice(
        ["Sort these words alphabetically:", "Put these words in alphabetical order:", "Sort from A to Z:"]
    )
    return _about_words("sort_words", instruction, words, " ".join(sorted(words)))


def count_words(rng: random.Random) -> Question:
    words = rng.choices(WORDS, k=rng.randint(2, 9))
    instruction = rng.choice(["How many words are in this list:", "Count the words:", "Count the words in this list:"])
    return _about_words("count_words", instruction, words, str(len(words)))


def pick_word(rng: random.Random) -> Question:
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


def copy_sentence(rng: random.Random) -> Question:
    first, second, third = rng.sample(WORDS, 3)
    one, two = rng.sample(ADJECTIVES, 2)
    verb, place, number = rng.choice(VERBS), rng.choice(PREPOSITIONS), rng.randint(2, 99)
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
