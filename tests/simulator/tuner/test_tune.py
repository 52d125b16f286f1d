import pytest
from llm_serving.cli.main import main
from llm_serving.config import load_config
from llm_serving_simulator.profile import write_profile
from llm_serving_simulator.tuner.yaml_writer import differences
from support.simulator_workloads import create_profile

LOAD = """\
streams:
  chat: {rate: 100, requests: 60, prompt_tokens: 12, answer_tokens: 8, class: interactive}
  bulk: {concurrency: 8, requests: 30, prompt_tokens: 40, answer_tokens: 16, class: batch}
"""


@pytest.fixture
def arguments(tmp_path):
    (tmp_path / "load.yaml").write_text(LOAD)
    (tmp_path / "my.yaml").write_text("model_config:\n    decode_batch_size: 2   # mine\n")
    (tmp_path / "goal.yaml").write_text("most: output_tokens\n")
    write_profile(create_profile(num_blocks=512), tmp_path / "profile.json")
    names = {
        "config": "my.yaml",
        "goal": "goal.yaml",
        "load": "load.yaml",
        "profile": "profile.json",
        "out": "out.yaml",
    }
    return ["tune", *(text for name, file in names.items() for text in (f"--{name}", str(tmp_path / file)))]


def test_differences_ignore_the_position_of_keys(tmp_path):
    for name in ("one", "other"):
        (tmp_path / f"{name}.yaml").write_text("model_config: {decode_batch_size: 2}\n")
    one, other = (load_config(tmp_path / f"{name}.yaml") for name in ("one", "other"))
    assert differences(one, other) == []
    changed = load_config(tmp_path / "one.yaml", ["model_config.decode_batch_size=4"])
    assert differences(one, changed) == ["model.decode_batch_size"]


def test_tune_needs_optuna(arguments, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    assert main(arguments) == 2
    assert "pip install -e 'llm-serving[tune]'" in capsys.readouterr().err


def test_tuned_yaml_has_comments_and_depends_on_the_seed(arguments, tmp_path, capsys):
    pytest.importorskip("optuna")
    assert main([*arguments, "--trials", "6"]) == 0
    text = (tmp_path / "out.yaml").read_text()
    assert text.startswith("# Tuned for most output_tokens_per_s.")
    assert "# Tuned: was 2. With that, output_tokens_per_s would be" in text
    assert "# mine" in text
    assert load_config(tmp_path / "out.yaml").model.decode_batch_size > 2
    assert main([*arguments, "--trials", "6"]) == 0
    assert (tmp_path / "out.yaml").read_text() == text


def test_tune_reports_limits_of_an_infeasible_objective(arguments, tmp_path, capsys):
    pytest.importorskip("optuna")
    (tmp_path / "goal.yaml").write_text("constraints: {batch.latency_p99_ms: 20}\nmost: output_tokens\n")
    assert main([*arguments, "--trials", "5"]) == 1
    assert "NOT REACHED: batch.latency_p99_ms <= 20" in (shown := capsys.readouterr().out)
    assert "2 replicas in place of 1" in shown
    head = "# NOT reached with a margin of 10%, and the nearest found to it: batch.latency_p99_ms <= 20"
    assert (tmp_path / "out.yaml").read_text().startswith(head)
