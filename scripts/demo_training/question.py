"""A question of the demo tasks, the words in questions, and the split into a training part and a held-out part.

A hash of its content decides whether a question is held out. If the answer must be computed (sums, word lists, counting
ranges), the hash covers the operands, so a held-out sum is not trained in any phrasing. If the answer must be known
(facts, tables, rhymes), the hash covers the whole prompt: the fact is trained, but not the held-out phrasing.
"""

import zlib
from dataclasses import dataclass

HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Question:
    """One question in alpaca form and its only right answer.

    `key` is the content that decides whether the question is held out.
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


WORDS = (
    "apple arrow autumn baby ball banana basket beach bear bell bird boat book bottle bread bridge brush bucket "
    "button cake camel candle carrot castle cat chair cheese circle city clock cloud coat corn cow cup daisy desk "
    "dog donkey door dragon dream drum duck eagle ear earth egg engine eye falcon farm feather field finger fire "
    "fish flag flower fork forest fox frog garden gate ghost gift glass glove goat gold grape grass guitar hammer "
    "hand hat heart hill honey horse house ice island jacket jar jewel juice jungle key king kite knife ladder "
    "lake lamp leaf lemon letter lion map market melon milk mirror moon mountain mouse needle nest night nose oak "
    "ocean onion orange owl paint paper pear pencil piano pig pillow planet plum pocket pond queen rabbit rain "
    "ribbon river road robin rocket roof rope rose sail salt sand school sheep ship shirt shoe silver snow spoon "
    "star stone sugar sun table tiger tower train tree turtle umbrella valley violin wagon water whale wheel "
    "window winter wolf wood zebra"
).split()

ADJECTIVES = "big small old young red green blue white black quiet happy brave clever gentle hungry tall".split()
VERBS = "sees finds likes follows hides carries wants paints draws watches".split()
PREPOSITIONS = "near behind under above beside".split()

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
NATO = (
    "Alfa Bravo Charlie Delta Echo Foxtrot Golf Hotel India Juliett Kilo Lima Mike November Oscar Papa Quebec Romeo "
    "Sierra Tango Uniform Victor Whiskey Xray Yankee Zulu"
).split()
NUMBER_WORDS = "no one two three four five six seven eight nine ten".split()
ORDINALS = "first second third fourth fifth".split()
