"""The YAML that a search writes: somebody's own, with what was changed and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import yaml
from llm_serving.config.schema import ServingConfig

from llm_serving_simulator.report import mark, number
from llm_serving_simulator.tuner.ablation import Effect
from llm_serving_simulator.tuner.edited_yaml import Edit, comment, edited, rows_of
from llm_serving_simulator.tuner.goal import Goal
from llm_serving_simulator.tuner.knobs import yaml_text
from llm_serving_simulator.tuner.trial import Trial, Trials

CLASSES = "request_classes"


def tuned_yaml(source: Path, config: ServingConfig, trials: Trials, tuned: Trial, effects: Sequence[Effect]) -> str:
    """The text of the tuned configuration.

    Args:
        source: The YAML to begin with.
        config: As it was read.
        trials: That the figures are from.
        tuned: The best of them.
        effects: Of its changes.
    """
    text = source.read_text(encoding="utf-8")
    if any(each.key.startswith(f"{CLASSES}.") for each in effects) and not _has_classes(text):
        text = f"{text.rstrip()}\n\n# As they are by default, but for what is said.\n{_default_classes(config)}"
    edits = [Edit(each.key, each.value, _comment(trials.goal, tuned, each)) for each in effects]
    return _head(trials, tuned) + edited(text, edits)


def differences(read: ServingConfig, wanted: ServingConfig) -> list[str]:
    """Keys in which a configuration that was written is not what it should be."""
    found = []
    for item in dataclasses.fields(ServingConfig):
        if item.name in ("sources", "notices", "hub_model") or not item.compare:
            continue
        one, other = getattr(read, item.name), getattr(wanted, item.name)
        if one != other and dataclasses.is_dataclass(one):
            names = [each.name for each in dataclasses.fields(one)]
            found += [f"{item.name}.{name}" for name in names if getattr(one, name) != getattr(other, name)]
        elif one != other:
            found.append(item.name)
    return found


def _head(trials: Trials, tuned: Trial) -> str:
    goal = trials.goal
    margin = max((each.margin for each in goal.constraints), default=0.0)
    word = "Tuned for" if tuned.feasible else f"NOT reached with a margin of {margin:.0%}, and the nearest found to it:"
    keys = dict.fromkeys([*(each.figure.key for each in goal.constraints), goal.objective.key])
    told = ", ".join(f"{key} {_of(trials.own, key)} -> {_of(tuned, key)}" for key in keys)
    lines = (
        f"{word} {goal}.",
        f"Load {trials.load.name}, seed {trials.seed}; {mark(trials.profile)}.",
        f"Simulated, before -> tuned: {told}.",
    )
    return "".join(comment(line, 0) for line in lines)


def _of(trial: Trial, key: str) -> str:
    return number(key, trial.figures.get(key, float("nan")))


def _comment(goal: Goal, tuned: Trial, effect: Effect) -> str:
    costs = effect.costs(goal, tuned)
    return (
        f"Tuned: was {yaml_text(effect.was)}. With that, {effect.brings(goal, tuned)}."
        f"{f' It costs: {costs}.' if costs else ''}"
    )


def _has_classes(text: str) -> bool:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return isinstance(root, yaml.MappingNode) and any(
        key.value == CLASSES and isinstance(value, yaml.MappingNode) for key, value in root.value
    )


def _default_classes(config: ServingConfig) -> str:
    rows = []
    for each in config.request_classes:
        values = dataclasses.asdict(each)
        rows.append((str(values.pop("name")), values))
    return rows_of(CLASSES, rows)
