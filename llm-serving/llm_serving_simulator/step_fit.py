"""What the time of steps is made of, of those that were formed ahead and of those that were not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llm_serving_simulator.cost_model import CONSTANT, Piece
from llm_serving_simulator.fitting import STEP_PIECES, Fit, Sometimes, fit
from llm_serving_simulator.measured_steps import MeasuredStep

FORM_PIECES: Final = (Piece(CONSTANT, 1.0), Piece("rows", 1.0))
"""What forming a step may take, until the WorkAgent has it."""
LEAST_AHEAD: Final = 50
"""Steps that were formed ahead, to tell what forming takes from what steps take."""


def fitted_steps(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Those that tell most: formed ahead, and of the others those without prompts, as they are short beside forming.

    Where too few were formed ahead, all.
    """
    ahead = [each for each in steps if each.ahead]
    if len(ahead) < LEAST_AHEAD:
        return [*steps]
    return [each for each in steps if each.ahead or each.shape.tokens == each.shape.samples]


def fit_steps(steps: Sequence[MeasuredStep], seconds: Sequence[float], seed: int = 1, held_out: bool = True) -> Fit:
    """Fits seconds of steps; `Fit.sometimes` is what those take longer that were not formed ahead.

    Args:
        steps: As `fitted_steps` has them; those that verify draft tokens are among them.
        seconds: In place of what each took.
        seed: Draws what is held out.
        held_out: Whether anything is.
    """
    told_apart = sum(each.ahead for each in steps) >= LEAST_AHEAD
    forming = Sometimes(FORM_PIECES if told_apart else (), [not each.ahead for each in steps])
    return fit([each.shape for each in steps], seconds, STEP_PIECES, seed, held_out, forming)
