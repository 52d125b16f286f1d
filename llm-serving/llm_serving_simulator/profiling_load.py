"""What is asked of a server so that its steps are of all shapes: phases, each a load for some seconds."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from llm_serving_simulator.load import Asked, Load, Stream

MAX_REQUESTS: Final = 2048
"""Of a phase, more than any server answers meanwhile."""
ROUNDS: Final = 2
"""All is asked so often, so that a slow minute of the machine does not make one kind of steps slow."""
SECONDS_PER_CONCURRENCY: Final = 2.5
ALONE_PER_S: Final = 2.5
"""Requests with pauses between them, in which the server has nothing to do."""
SECONDS_ALONE: Final = 5.0
MANY: Final = 16
"""From so many clients on, the prompts of which take most of a phase, there is one of short prompts too."""
SHORT_PROMPT: Final = 4
SECONDS_DECODING: Final = 2.0
LONGEST_ANSWER: Final = 128
AGAIN: Final = (1, 2, 4, 8)
"""Clients that repeat their requests, so that a server drafts the answers where that pays."""
SECONDS_AGAIN: Final = 1.25
ANSWER_AGAIN: Final = 96
LARGER_S: Final = 4.0
"""Of each phase of larger steps."""


class Phase(NamedTuple):
    name: str
    seconds: float
    load: Load


class Limits(NamedTuple):
    """Of the server."""

    num_slots: int
    """Requests that run at once."""
    max_len: int
    """Tokens of a prompt and its answer."""
    num_cached: int
    """Tokens that the cache has room for."""
    vocab_size: int

    def room_of_each(self, count: int) -> int:
        """Tokens of a prompt and its answer, of so many at once."""
        return max(2, min(self.max_len, self.num_cached // count) - 1)


def phases(limits: Limits, seed: int = 1, scale: float = 1.0) -> list[Phase]:
    """What is played one after the other, each for its seconds.

    One request after the other, prompts of all lengths; the same with pauses; as many clients as slots, and half as
    many, and so on, with prompts and answers of mixed lengths, and with short prompts where they are many, so that
    there are steps that only decode; long contexts; prompts alone, more than there are slots;
    few clients that repeat their requests, whose answers can be drafted. All of that in rounds.

    Args:
        limits: Of the server.
        seed: Of lengths and tokens.
        scale: Of the seconds.
    """
    rng = random.Random(seed)
    found = [_clients(rng, limits, 4, (16, 64), (8, 16), scale, "warming up")]
    for _ in range(ROUNDS):
        found += _round(rng, limits, scale)
    return found


def larger_phases(limits: Limits, num_tokens: int, own: Limits, own_tokens: int, scale: float = 1.0) -> list[Phase]:
    """What makes steps larger than those of `phases`, on a server that allows them.

    Args:
        limits: Of that server.
        num_tokens: Of its steps, at most.
        own: Of the server that `phases` were played on.
        own_tokens: Of the steps there.
        scale: Of the seconds.
    """
    rng, most, seconds = random.Random(own_tokens), max(4, limits.max_len - 2), LARGER_S * scale
    low, high = max(2, most // 4), max(3, most // 2)
    found = [_clients(rng, limits, 4, (16, 64), (8, 16), scale, "warming up for larger steps")]
    if limits.num_slots > own.num_slots:
        room = max(8, min(most, limits.num_cached // limits.num_slots))
        prompt = 4, max(5, room // 2)
        count = limits.num_slots
        found.append(_clients(rng, limits, count, prompt, (2, max(3, room // 3)), seconds, f"{count} clients"))
        found.append(_decoding(rng, limits, count, seconds))
    longest = most * 3 // 4
    few = max(1, min(limits.num_slots, limits.num_cached // limits.max_len))
    found.append(_clients(rng, limits, few, (most // 2, longest), (16, max(17, most // 8)), seconds, "full cache"))
    size = 2 * own_tokens
    while size < 2 * num_tokens:
        size = min(size, num_tokens)
        # Half of the clients are answered by a step while the others wait for the next.
        count = max(2, min(2 * limits.num_slots, round(2 * size / ((low + high) / 2))))
        found.append(_clients(rng, limits, count, (low, high), (1, 2), seconds, f"prompts, {size} tokens a step"))
        size *= 2
    return found


def _round(rng: random.Random, limits: Limits, scale: float) -> Iterator[Phase]:
    due = itertools.accumulate(rng.expovariate(ALONE_PER_S) for _ in range(MAX_REQUESTS))
    most = max(2, limits.max_len - 2)
    yield _clients(rng, limits, 1, (4, most // 2), (4, 24), 2.0 * scale, "one request at a time")
    seldom = itertools.islice(_requests(rng, "seldom", limits, (4, most // 4), (4, 16)), MAX_REQUESTS)
    asked = [replace(each, due_s=time) for each, time in zip(seldom, due, strict=True)]
    load = Load("seldom", (Stream("seldom", asked),), 0, limits.vocab_size)
    yield Phase("requests with pauses", SECONDS_ALONE * scale, load)
    counts = [2**power for power in range(1, 1 + max(0, math.ceil(math.log2(limits.num_slots))))]
    for count in (min(count, limits.num_slots) for count in counts):
        room = max(8, min(most, limits.num_cached // count))
        answer = max(2, min(LONGEST_ANSWER, room // 3))
        prompt = 4, max(5, min(room - answer - 1, most // 2))
        seconds = SECONDS_PER_CONCURRENCY * scale
        yield _clients(rng, limits, count, prompt, (2, answer), seconds, f"{count} clients")
        if count >= MANY:
            yield _decoding(rng, limits, count, SECONDS_DECODING * scale)
    few = max(1, min(limits.num_slots, 8, limits.num_cached // limits.max_len))
    prompt = most // 2, max(3, most * 3 // 4)
    yield _clients(rng, limits, few, prompt, (16, max(17, most // 8)), 3.0 * scale, "long contexts")
    yield _clients(rng, limits, 2 * limits.num_slots, (4, max(5, most // 2)), (1, 2), 3.0 * scale, "prompts")
    for count in (count for count in AGAIN if count <= limits.num_slots):
        yield _again(rng, limits, count, SECONDS_AGAIN * scale)


def _decoding(rng: random.Random, limits: Limits, count: int, seconds: float) -> Phase:
    """So many clients whose answers end at one time, behind prompts that one step has room for."""
    room = limits.room_of_each(count)
    prompt = max(1, min(SHORT_PROMPT, room // 2))
    answer = max(1, min(LONGEST_ANSWER, room - prompt))
    return _clients(rng, limits, count, (prompt, prompt), (answer, answer), seconds, f"{count} clients, short prompts")


def _clients(
    rng: random.Random,
    limits: Limits,
    count: int,
    prompt: tuple[int, int],
    answer: tuple[int, int],
    seconds: float,
    name: str,
) -> Phase:
    """So many clients, each of which asks again when it has been answered."""
    asked = list(itertools.islice(_requests(rng, name, limits, prompt, answer), MAX_REQUESTS))
    return _loop(asked, limits, count, seconds, name)


def _again(rng: random.Random, limits: Limits, count: int, seconds: float) -> Phase:
    """So many clients and requests, which come again and again."""
    room = limits.room_of_each(count)
    answer, name = min(ANSWER_AGAIN, max(1, room // 2)), f"{count} clients, the same again"
    few = list(itertools.islice(_requests(rng, name, limits, (4, min(32, room // 2 + 3)), (answer, answer)), count))
    asked = [few[number % count] for number in range(MAX_REQUESTS)]
    return _loop(asked, limits, count, seconds, name)


def _loop(asked: list[Asked], limits: Limits, count: int, seconds: float, name: str) -> Phase:
    """So many clients that ask all this."""
    return Phase(name, seconds, Load(name, (Stream(name, asked, count),), 0, limits.vocab_size))


def _requests(
    rng: random.Random, name: str, limits: Limits, prompt: tuple[int, int], answer: tuple[int, int]
) -> Iterator[Asked]:
    """Lengths are spread evenly over their orders of magnitude."""
    while True:
        num_prompt = _length(rng, *prompt)
        num_answer = max(1, min(_length(rng, *answer), limits.max_len - num_prompt))
        tokens = rng.choices(range(3, limits.vocab_size), k=num_prompt)
        yield Asked(name, 0.0, tokens, num_answer, num_answer, ignore_eos=True)


def _length(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))
