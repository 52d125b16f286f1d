"""Check that answers are right, equal alone and under load, and equal after a WorkAgent was killed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence

from acceptance.device.outcome import Outcome, PartError, table
from acceptance.device.server import Answer, Server, ask
from llm_serving.config.paths import DEMO_FOLDER

RIGHT = "Right answers of the shipped model"
RIGHT_SHARE = 0.97
"""Minimum share of its held-out questions that the shipped model must answer exactly; on a CPU it is above 99 %."""
AT_ONCE = 48
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

Ask = Callable[..., list[Answer]]


def bodies(count: int) -> list[dict[str, object]]:
    """Return short and long requests, greedy and sampled ones."""
    made: list[dict[str, object]] = []
    for index in range(count):
        prompt = " ".join([TASKS[index % len(TASKS)]] * (1 + index % 4))
        body = {"prompt": prompt, "max_tokens": 16 + index % 48, "ignore_eos": True}
        made.append(body | ({"temperature": 0.9, "seed": index} if index % 3 == 2 else {"temperature": 0}))
    return made


def compare(reference: Sequence[Answer], together: Sequence[Answer]) -> list[str]:
    """Return the differences between answers."""
    return [
        f"request {index} answers otherwise: {one.text[:60]!r} alone, {other.text[:60]!r} then"
        for index, (one, other) in enumerate(zip(reference, together, strict=True))
        if not one.same(other)
    ]


def right(server: Server, ask: Ask = ask) -> Outcome:
    """Ask a server of the shipped model its held-out questions, many at once.

    Raises:
        PartError: The server cannot answer.
    """
    questions = json.loads((DEMO_FOLDER / "questions.json").read_text())
    asked = [
        {
            "prompt": f"{each['instruction']} {each['input']}".strip(),
            "max_tokens": len(each["output"].encode()) + 2,
            "temperature": 0,
        }
        for each in questions
    ]
    answers = [answer for at in range(0, len(asked), AT_ONCE) for answer in ask(server.url, asked[at : at + AT_ONCE])]
    asked_of, right_of = Counter[str](), Counter[str]()
    wrong = []
    for question, answer in zip(questions, answers, strict=True):
        asked_of[question["task"]] += 1
        if answer.text.strip() == question["output"]:
            right_of[question["task"]] += 1
        else:
            wrong.append(f"{question['instruction']} {question['input']}: {answer.text.strip()[:60]!r}")
    share = right_of.total() / len(questions)
    lines = [
        f"{right_of.total()} of {len(questions)} held-out questions, {AT_ONCE} at once; {RIGHT_SHARE:.0%} are needed."
    ]
    lines += [
        "",
        *table(("task", "right", "of"), [(task, right_of[task], asked_of[task]) for task in sorted(asked_of)]),
    ]
    if share >= RIGHT_SHARE:
        return Outcome(RIGHT, lines)
    faults = [f"only {share:.1%} of the answers are right, {RIGHT_SHARE:.0%} are needed; some wrong ones:", *wrong[:5]]
    return Outcome(RIGHT, lines, faults)


def same_bytes(server: Server, count: int, reference: list[Answer], ask: Ask = ask) -> Outcome:
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


def killed(server: Server, reference: Sequence[Answer], ask: Ask = ask) -> Outcome:
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
