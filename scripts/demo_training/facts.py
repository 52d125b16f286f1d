"""Questions with answers in a table: facts, and the neighbours of an item in a known order."""

import random

from demo_training.question import DAYS, LETTERS, MONTHS, Question

CAPITALS = {
    "Argentina": "Buenos Aires", "Australia": "Canberra", "Austria": "Vienna", "Belgium": "Brussels",
    "Brazil": "Brasilia", "Canada": "Ottawa", "Chile": "Santiago", "China": "Beijing",
    "Cuba": "Havana", "Denmark": "Copenhagen", "Egypt": "Cairo", "Finland": "Helsinki",
    "France": "Paris", "Germany": "Berlin", "Greece": "Athens", "Hungary": "Budapest",
    "Iceland": "Reykjavik", "India": "New Delhi", "Indonesia": "Jakarta", "Iran": "Tehran",
    "Ireland": "Dublin", "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi",
    "Mexico": "Mexico City", "Morocco": "Rabat", "Nepal": "Kathmandu", "Netherlands": "Amsterdam",
    "Norway": "Oslo", "Peru": "Lima", "Poland": "Warsaw", "Portugal": "Lisbon",
    "Russia": "Moscow", "Spain": "Madrid", "Sweden": "Stockholm", "Switzerland": "Bern",
    "Thailand": "Bangkok", "Turkey": "Ankara", "Ukraine": "Kyiv", "Vietnam": "Hanoi",
}  # fmt: skip

SOUNDS = {
    "cat": "meows", "dog": "barks", "cow": "moos", "sheep": "bleats", "pig": "grunts", "horse": "neighs",
    "duck": "quacks", "lion": "roars", "wolf": "howls", "frog": "croaks", "owl": "hoots", "mouse": "squeaks",
    "bee": "buzzes", "snake": "hisses", "donkey": "brays",
}  # fmt: skip

YOUNG = {
    "cat": "kitten", "dog": "puppy", "cow": "calf", "sheep": "lamb", "pig": "piglet", "horse": "foal",
    "duck": "duckling", "lion": "cub", "goat": "kid", "frog": "tadpole", "owl": "owlet", "swan": "cygnet",
    "hen": "chick", "goose": "gosling", "deer": "fawn",
}  # fmt: skip

COLOURS = {
    "grass": "green", "snow": "white", "blood": "red", "coal": "black", "milk": "white", "chocolate": "brown",
    "a carrot": "orange", "a banana": "yellow", "a tomato": "red", "a lemon": "yellow", "the clear sky": "blue",
    "an elephant": "grey", "a flamingo": "pink", "a raven": "black", "an emerald": "green",
}  # fmt: skip

OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "high": "low", "light": "dark", "wet": "dry", "old": "new",
    "full": "empty", "open": "closed", "early": "late", "strong": "weak", "near": "far", "rich": "poor",
    "hard": "soft", "long": "short", "loud": "quiet", "thick": "thin", "deep": "shallow", "clean": "dirty",
    "true": "false", "up": "down", "left": "right", "happy": "sad", "day": "night", "love": "hate",
}  # fmt: skip

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


def fact(rng: random.Random) -> Question:
    table, phrases = rng.choices(_FACTS, weights=[len(table) for table, _ in _FACTS])[0]
    subject = rng.choice(list(table))
    return Question("fact", rng.choice(phrases).format(subject), table[subject])


def sequence(rng: random.Random) -> Question:
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
