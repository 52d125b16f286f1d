"""Files described in docs/guides/tuning.md: workloads, and a plot with its command."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
from llm_serving.cli import main
from llm_serving.config import load_config
from llm_serving_simulator.commands.whatif import read_variant
from llm_serving_simulator.profile import read_profile
from llm_serving_simulator.recordings import load_workload
from llm_serving_simulator.report import profile_source
from llm_serving_simulator.tuner.problem import classes_in

ROOT = Path(__file__).parents[2]
PLOT = "docs/images/whatif.svg"
MOST_BYTES = 150_000
CONFIG = Path("configs/demo_cpu.yaml")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def arguments_with(option: str) -> argparse.Namespace:
    """Return the arguments of the command in docs/guides/tuning.md that has an option."""
    text = Path("docs/guides/tuning.md").read_text().replace("\\\n", " ")
    (line,) = (each for each in text.splitlines() if each.startswith(".venv/bin/llm-serving") and option in each)
    return main._parser().parse_args(shlex.split(line)[1:])


def test_shipped_plot_equals_that_of_the_documented_command():
    arguments = arguments_with(f"--svg {PLOT}")
    profile, load = read_profile(arguments.profile), load_workload(arguments.load)
    variants = [read_variant(each, arguments.model, profile, arguments.seed) for each in arguments.configs]
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
def test_shipped_workloads_can_be_simulated(path):
    load = load_workload(path)
    assert classes_in(load_config(CONFIG), load)
