"""One question of the demo tasks, and on which side of the split it falls.

A question is held out of training by a hash of its content. Where the answer must be worked out (sums, word lists,
counting ranges) the hash covers the operands, so no phrasing of a held-out sum is ever trained. Where the answer must
be known (facts, tables, rhymes) it covers the whole prompt: the fact is trained, the held-out phrasing of it is not.
"""

import zlib
from dataclasses import dataclass

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
