"""Check that answers are equal alone and under load, and after a WorkAgent was killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from acceptance.device.outcome import Outcome, PartError
from acceptance.device.server import Server, ask

SAME_BYTES = "Same bytes alone and under load"
KILL = "A WorkAgent killed in the middle of its work"
PROMISED = "the same request gets the same bytes"
TASKS = (
    "Count from 1 to 20.",
    "Add 17 and 25.",
    "Name the days of the week.",
    "What is the capital of France?",
    "Write a sentence about the sea and the mountains behind it.",
)

Ask = Callable[..., list[str]]


def bodies(count: int) -> list[dict[str, object]]:
    """Return short and long requests, greedy and sampled ones."""
    made: list[dict[str, object]] = []
    for index in range(count):
        prompt = " ".join([TASKS[index % len(TASKS)]] * (1 + index % 4))
        body = {"prompt": prompt, "max_tokens": 16 + index % 48, "ignore_eos": True, "return_token_ids": True}
        made.append(body | ({"temperature": 0.9, "seed": index} if index % 3 == 2 else {"temperature": 0}))
    return made


def compare(reference: Sequence[str], together: Sequence[str]) -> list[str]:
    """Return the differences between answers."""
    return [
        f"request {index} answers otherwise: {one[:60]} alone, {other[:60]} then"
        for index, (one, other) in enumerate(zip(reference, together, strict=True))
        if one != other
    ]


def same_bytes(server: Server, count: int, reference: list[str], ask: Ask = ask) -> Outcome:
    """Send each request alone, then all at once.

    Differences are faults if the server guarantees equality; otherwise they are only reported.

    Args:
        server: The server under test.
        count: Number of requests.
        reference: Filled with the reference answers.
        ask: Sends requests.

    Raises:
        PartError: The server cannot answer.
    """
    asked = bodies(count)
    reference += [ask(server.url, [body])[0] for body in asked]
    different = compare(reference, ask(server.url, asked))
    promise = server.promise
    lines = [f"{count - len(different)} of {count} answers are the same. The server promises: {promise}"]
    if different and PROMISED not in promise:
        return Outcome(SAME_BYTES, [*lines, "", *(f"- {each}" for each in different)])
    return Outcome(SAME_BYTES, lines, different)


def killed(server: Server, reference: Sequence[str], ask: Ask = ask) -> Outcome:
    """Send all requests at once and kill the WorkAgent: every stream must continue with the same bytes.

    Raises:
        PartError: The server cannot answer.
    """
    if not reference:
        raise PartError("there are no answers to compare with: the part before failed")
    before = server.restarts()
    together = ask(server.url, bodies(len(reference)), server.killer())
    restarts = server.restarts() - before
    different = compare(reference, together)
    lines = [f"{len(reference) - len(different)} of {len(reference)} answers are the same; restarts: {restarts}"]
    faults = [] if restarts else ["no WorkAgent was started again: it was not killed, or too late"]
    return Outcome(KILL, lines, [*faults, *(different if PROMISED in server.promise else ())])
