"""Files that docs/guides/tuning.md tells of: loads, and a plot with the command that draws it."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
from llm_serving.cli import main
from llm_serving.config import load_config
from llm_serving_simulator.commands.whatif import read_variant
from llm_serving_simulator.profile import read_profile
from llm_serving_simulator.recorded_workload import load_workload
from llm_serving_simulator.report import profile_source
from llm_serving_simulator.tuner.search_space import classes_in

ROOT = Path(__file__).parents[2]
PLOT = "docs/images/whatif.svg"
MOST_BYTES = 150_000
CONFIG = Path("configs/demo_cpu.yaml")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def told_with(option: str) -> argparse.Namespace:
    """The arguments of the command of docs/guides/tuning.md that has an option."""
    text = Path("docs/guides/tuning.md").read_text().replace("\\\n", " ")
    (line,) = (each for each in text.splitlines() if each.startswith(".venv/bin/llm-serving") and option in each)
    return main._parser().parse_args(shlex.split(line)[1:])


def test_the_plot_is_that_of_the_command_that_is_told():
    told = told_with(f"--svg {PLOT}")
    profile, load = read_profile(told.profile), load_workload(told.load)
    variants = [read_variant(each, told.model, profile, told.seed) for each in told.configs]
    plot = (ROOT / PLOT).read_text()
    assert len(plot) < MOST_BYTES
    shown = re.findall("<!-- (.*) -->", plot)
    assert f"load {load.name}; {profile_source(profile)}" in shown
    assert [name for each in shown if (name := each.partition(": ")[0]) in {one.name for one in variants}] == [
        each.name for each in variants
    ]
    for name in classes_in(variants[0].config, load):
        assert name in shown


@pytest.mark.parametrize("path", sorted((ROOT / "performance" / "loads").iterdir()), ids=lambda path: path.name)
def test_loads_can_be_played(path):
    load = load_workload(path)
    assert classes_in(load_config(CONFIG), load)
