"""The goals and loads that tuning is proved with, and the YAMLs that it is compared with."""

import math
from pathlib import Path

import pytest
from llm_serving.config import load_config
from llm_serving.whatif.profile import read_profile
from llm_serving.whatif.report import mark
from llm_serving.whatif.tuning.knobs import classes_in, tenants_in
from llm_serving.whatif.tuning.tuned_yaml import differences
from llm_serving.whatif.workload import read_workload
from support.whatif_loads import create_profile
from tuning_proof import DEFAULT, NO_SPECULATION, TASKS, TUNED, Bench

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", TASKS)
def test_goals_are_of_their_loads_and_random_yamls_can_be_served(tmp_path, name):
    config = tmp_path / "my.yaml"
    config.write_text("model_config: {decode_batch_size: 64}\npa_config: {num_blocks: 1024}\n")
    bench = Bench(name, config, tmp_path / name, create_profile(), 1)
    load = read_workload(bench.path("load"))
    bench.goal.check_groups(classes_in(load_config(config), load), tenants_in(load))
    variants = list(bench.variants(3))
    assert [each[0] for each in variants] == [DEFAULT, TUNED, "random 1", "random 2", "random 3"]
    assert len({str(overrides) for _, _, overrides in variants[2:]}) == 3
    for _, _, overrides in variants[2:]:
        load_config(config, overrides)
    assert all(set(NO_SPECULATION) <= set(overrides) for _, _, overrides in variants)
    assert load_config(config, variants[0][2]).scheduler.speculative_method == "none"


def test_what_was_measured_is_kept_and_stands_beside_what_is_predicted(tmp_path):
    config = tmp_path / "my.yaml"
    config.write_text("model_config: {decode_batch_size: 64}\npa_config: {num_blocks: 1024}\n")
    bench = Bench("promises", config, tmp_path, create_profile(), 1)
    bench.path(TUNED).write_text(config.read_text())
    bench.keep(DEFAULT, {"goodput_per_s": 12.3456, "ttft_p50_ms": math.nan, "steps": 7})
    assert bench.measured == {DEFAULT: {"goodput_per_s": 12.35}}
    bench.keep(TUNED, {"goodput_per_s": 12.36})
    rows = bench.table(1).splitlines()
    assert [row.partition(" / ")[2] for row in rows if " / 12." in row] == ["12.35 | yes |", "12.36 | yes |"]
    assert rows[-1] == "best: tuned"


@pytest.mark.parametrize("name", TASKS)
def test_a_kept_yaml_is_tuned_for_the_goal_beside_it_by_the_profile_that_is_kept(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    folder = Path("performance/tuned", name.replace(" ", "_"))
    assert (folder / "goal.yaml").is_file()
    config, profile = Path("configs/demo_cpu.yaml"), read_profile(Path("performance/profiles/demo_zen5.json"))
    bench = Bench(name, config, folder, profile, 1)
    own, load = load_config(config), read_workload(bench.path("load"))
    bench.goal.check_groups(classes_in(own, load), tenants_in(load))
    text = bench.path(TUNED).read_text()
    told = " ".join(text.replace("\n#", "").split())
    assert told.startswith(f"# Tuned for {bench.goal}. Load load, seed 1; {mark(profile)}.")
    assert "# Tuned: was " in text
    assert differences(load_config(bench.path(TUNED)), own)
