"""Seeded mixes of requests; pure functions."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from runner import Job
from workload import Prompt

SHORT_ANSWER_CHARACTERS = 12


def shares(num: int, weights: Mapping[str, float], rng: random.Random) -> list[str]:
    """`num` names in random order, as many of each as its weight asks for; rounding favours the largest remainders."""
    total = sum(weights.values())
    exact = {name: num * weight / total for name, weight in weights.items()}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: num - sum(counts.values())]:
        counts[name] += 1
    names = [name for name, count in counts.items() for _ in range(count)]
    rng.shuffle(names)
    return names


def job(prompt: Prompt, group: str, max_tokens: int, **fields: Any) -> Job:
    """A request of a group, which `RequestRecord.task` will name."""
    return Job(replace(prompt, task=group), max_tokens, fields)


def short_questions(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Those whose right answer is a word or a number."""
    return [prompt for prompt in prompts if len(prompt.reference) <= SHORT_ANSWER_CHARACTERS]


def long_prompts(questions: Sequence[Prompt], num_prompts: int, num_words: int, rng: random.Random) -> list[Prompt]:
    """Prompts of `num_words` words that the questions are made of, all different from the first word on."""
    words = sorted({word for prompt in questions for word in re.findall(r"\b[a-z]{3,}\b", prompt.text)})
    firsts = rng.sample(words, num_prompts)
    return [Prompt(" ".join([first, *rng.choices(words, k=num_words - 1)])) for first in firsts]


def merged(*streams: tuple[Sequence[Job], Sequence[float]]) -> tuple[list[Job], list[float]]:
    """Several streams of (jobs, due times in seconds) as one, in order of time."""
    pairs = [pair for jobs, due_times_s in streams for pair in zip(jobs, due_times_s, strict=True)]
    pairs.sort(key=lambda pair: pair[1])
    return [job for job, _ in pairs], [due for _, due in pairs]
