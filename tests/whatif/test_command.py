import json

import pytest
from llm_serving.cli import main
from llm_serving.whatif.profile import write_profile
from whatif_loads import create_profile

LOAD = """\
streams:
  chat: {rate: 20, requests: 30, prompt_tokens: 12, answer_tokens: 8, class: interactive, tenants: 2}
  bulk: {concurrency: 2, requests: 10, prompt_tokens: 40, answer_tokens: 16, class: batch}
"""


@pytest.fixture
def arguments(tmp_path):
    (tmp_path / "load.yaml").write_text(LOAD)
    (tmp_path / "my.yaml").write_text("model_config: {decode_batch_size: 8}\n")
    write_profile(create_profile(), tmp_path / "profile.json")
    config = str(tmp_path / "my.yaml")
    files = ["--load", str(tmp_path / "load.yaml"), "--profile", str(tmp_path / "profile.json")]
    return ["whatif", config, f"{config}+model_config.decode_batch_size=2", *files]


def test_configurations_stand_side_by_side(arguments, capsys):
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "my  my+decode_batch_size=2" in shown.splitlines()[0]
    assert "class batch" in shown
    assert "NOT MEASURED: times of tests are figures of made up" in shown
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line and not line.startswith(" ")}
    assert rows["answered"] == ["40", "40"]
    assert float(rows["output_tokens_per_s"][0]) > float(rows["output_tokens_per_s"][1])


def test_numbers_come_as_json(arguments, capsys):
    assert main([*arguments, "--json", "-"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["profile"]["measured"] is False
    assert first["figures"]["interactive.requests"] == 30
    assert first["figures"]["bound_violations"] == second["figures"]["bound_violations"] == 0


def test_the_highest_rate_is_found(arguments, capsys):
    assert main([*arguments[:2], *arguments[3:], "--find-rate"]) == 0
    assert "requests/s (" in capsys.readouterr().out


def test_a_load_of_another_kind_is_refused(arguments, tmp_path, capsys):
    arguments[arguments.index("--load") + 1] = str(tmp_path / "load.csv")
    assert main(arguments) == 2
    assert "must be a workload (*.yaml), or a recording" in capsys.readouterr().err
