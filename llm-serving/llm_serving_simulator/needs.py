"""What would have to change so that figures of a load stay within limits: one key, or one thing beyond the keys."""

from __future__ import annotations

from collections.abc import Iterator

from llm_serving_simulator.advice import neighbours
from llm_serving_simulator.reach import told_beyond
from llm_serving_simulator.report import number
from llm_serving_simulator.tuner.knobs import yaml_text
from llm_serving_simulator.tuner.limits import limits, reliefs, told
from llm_serving_simulator.tuner.trial import Trials


def what_would_keep(trials: Trials) -> Iterator[str]:
    """In lines: what there is, which keys with a value beside their own keep the constraints, what else would."""
    goal, own = trials.goal, trials.own
    is_kept = goal.violation(own.figures) == 0
    for each in goal.constraints:
        value = number(each.figure.key, own.figures[each.figure.key])
        yield f"{each}: it is {value}, {'kept' if each.kept(own.figures) else 'NOT KEPT'}"
    if is_kept:
        return
    num_played = 0
    yield "one key at a time:"
    for knob, other in neighbours(trials.configure({}), trials.load, trials.profile):
        num_played += 1
        trial = trials.of({knob.key: other})
        if trial.feasible and trial.result is not None and trial.result.complete:
            shown = ", ".join(
                f"{each.figure} {number(each.figure.key, trial.figures[each.figure.key])}" for each in goal.constraints
            )
            beyond = told_beyond(trial.result.notices)
            is_enough = f"(is enough){f'; {beyond}' if beyond else ''}"
            yield f"  {knob.key}: {yaml_text(knob.own_value)} -> {yaml_text(other)}: {shown} {is_enough}"
    yield f"  the others of {num_played} are not enough alone; `llm-serving tune` looks for several together"
    yield from limits(own, ())
    yield "beyond the YAML, one thing at a time:"
    for relief in reliefs(trials, own):
        yield f"  {told(trials, relief)}"
