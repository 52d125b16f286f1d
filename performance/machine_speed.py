"""How fast a machine is at the moment, beside when it was profiled: steps of a fixed load that takes about a second.

Who else computes on the same host takes of the speed of its memory and of its processors, for minutes at a time. What a
step takes whatever it computes, mostly reading the weights, follows the one; what each token adds, the other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from llm_serving.whatif.cost_model import CONSTANT, CostModel
from llm_serving.whatif.fitting import OUTLIER
from llm_serving.whatif.load import Asked, Load, Stream
from llm_serving.whatif.measured_steps import MeasuredStep
from llm_serving.whatif.non_negative import solve
from llm_serving.whatif.profile import Profile

MOST_CLIENTS: Final = 16
PROMPT: Final = 32
"""Tokens."""
LEAST_ANSWER: Final = 8
FURTHER_ANSWER: Final = 4
"""Tokens that each answer is longer than the one before, so that steps have ever fewer rows, down to one."""
LEAST_STEPS: Final = 20


class Speed(NamedTuple):
    """By what factor steps take longer than the profile says."""

    fixed: float = 1.0
    """What a step takes whatever it computes."""
    further: float = 1.0
    """What each token, key and the like comes to."""

    def __str__(self) -> str:
        return f"x {self.fixed:.2f}, {self.further:.2f}"


def reference(num_slots: int, vocab_size: int) -> Load:
    """As many requests at once as there are slots: their prompts, then steps of all, of ever fewer, down to one row."""
    rng, count = random.Random(1), min(num_slots, MOST_CLIENTS)
    lengths = [LEAST_ANSWER + FURTHER_ANSWER * (number + MOST_CLIENTS - count) for number in range(count)]
    requests = [
        Asked("reference", 0.0, rng.choices(range(3, vocab_size), k=PROMPT), length, length, ignore_eos=True)
        for length in lengths
    ]
    return Load("reference", (Stream("reference", requests, count),), 0, vocab_size)


def speed_of(steps: Sequence[MeasuredStep], profile: Profile) -> Speed:
    """By least squares of errors relative to the profile; of few steps nothing is told."""
    if len(steps) < LEAST_STEPS:
        return Speed()
    fixed_s = sum(each.seconds for each in profile.step.pieces if each.of == CONSTANT)
    predicted = np.array([predicted_s(each, profile) for each in steps])
    measured = np.array([each.seconds for each in steps])
    measured = np.minimum(measured, OUTLIER * np.median(measured / predicted) * predicted)
    matrix = np.column_stack([np.full(len(steps), fixed_s), predicted - fixed_s])
    fixed, further = solve(matrix / predicted[:, None], measured / predicted).tolist()
    return Speed(fixed, further)


def predicted_s(step: MeasuredStep, profile: Profile) -> float:
    """Of a step that was not formed ahead, with what forming it takes."""
    return profile.step.seconds(step.shape) + (0.0 if step.ahead else profile.form.seconds(step.shape))


def mean_of(speeds: Sequence[Speed]) -> Speed:
    return Speed(*(sum(each) / len(speeds) for each in zip(*speeds, strict=True)))


def at_speed(profile: Profile, speed: Speed) -> Profile:
    """As it would have been measured on a machine of this speed."""
    pieces = tuple(
        replace(each, seconds=each.seconds * (speed.fixed if each.of == CONSTANT else speed.further))
        for each in profile.step.pieces
    )
    return replace(profile, step=CostModel(pieces))
