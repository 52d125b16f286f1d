import json

import pytest
from llm_serving.cli.main import main
from llm_serving.errors import ConfigError, RecordingError
from llm_serving_simulator.commands import profile, whatif
from llm_serving_simulator.http_player import ClientTiming
from llm_serving_simulator.profile import CostModel, CostTerm, write_profile
from llm_serving_simulator.recordings import Timings
from llm_serving_simulator.tuner import trial
from support.recordings import record_steps
from support.simulator_workloads import STEP_S, create_profile

LOAD = """\
streams:
  chat: {rate: 20, requests: 30, prompt_tokens: 12, answer_tokens: 8, class: interactive, tenants: 2}
  bulk: {concurrency: 2, requests: 10, prompt_tokens: 40, answer_tokens: 16, class: batch}
"""


def recorded(folder):
    folder.mkdir()
    (folder / "a.rec").write_bytes(record_steps(100))


@pytest.fixture
def arguments(tmp_path):
    (tmp_path / "load.yaml").write_text(LOAD)
    (tmp_path / "my.yaml").write_text("model_config: {decode_batch_size: 8}\n")
    write_profile(create_profile(), tmp_path / "profile.json")
    config = str(tmp_path / "my.yaml")
    files = ["--load", str(tmp_path / "load.yaml"), "--profile", str(tmp_path / "profile.json")]
    return ["whatif", config, f"{config}+model_config.decode_batch_size=2", *files]


def test_whatif_compares_configurations(arguments, capsys):
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "my  my+decode_batch_size=2" in shown.splitlines()[0]
    assert "class batch" in shown
    assert "NOT MEASURED: times of tests are figures of made up" in shown
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line and not line.startswith(" ")}
    assert rows["answered"] == ["40", "40"]
    assert float(rows["output_tokens_per_s"][0]) > float(rows["output_tokens_per_s"][1])


def test_whatif_distinguishes_configurations_of_the_same_name(arguments, tmp_path, capsys):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "my.yaml").write_text("{}\n")
    arguments[2] = str(tmp_path / "new" / "my.yaml")
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == arguments[1:3]


def test_whatif_accepts_speculation_as_the_only_difference(arguments, tmp_path, capsys, monkeypatch):
    load = "streams: {chat: {concurrency: 1, requests: 4, prompt_tokens: 30, answer_tokens: 90, recited: 0.95}}\n"
    (tmp_path / "load.yaml").write_text(load)
    key = "scheduler_config.speculative_method"
    plain = f"{arguments[1]}+{key}=none"
    assert main(["whatif", arguments[1], plain, *arguments[3:], "--json", "-"]) == 0
    guessing, without = (each["figures"] for each in json.loads(capsys.readouterr().out))
    assert guessing["accepted_draft_tokens"] > 100 and without["draft_tokens"] == 0
    assert guessing["guesses_right"] == guessing["accepted_draft_tokens"]  # the old name, for one release
    assert guessing["tpot_p50_ms"] < 0.6 * without["tpot_p50_ms"]
    every = trial.neighbours
    monkeypatch.setattr(trial, "neighbours", lambda *asked: [each for each in every(*asked) if each[0].key == key])
    limit = 0.7 * without["tpot_p50_ms"]
    assert main(["whatif", plain, *arguments[3:], "--need", f"tpot_p50_ms={limit}"]) == 0
    (line,) = (each for each in capsys.readouterr().out.splitlines() if key in each)
    assert "none -> ngram" in line and "(sufficient)" in line


def test_whatif_prints_the_changes_that_meet_a_need(arguments, capsys, monkeypatch):
    every = trial.neighbours
    # each neighbour takes a simulation
    monkeypatch.setattr(trial, "neighbours", lambda *asked: list(every(*asked))[:2])
    few = [arguments[0], f"{arguments[1]}+model_config.decode_batch_size=4", *arguments[3:]]
    assert main([*few, "--need", "tenant tenant-0.ttft_p99_ms=1e9"]) == 0
    assert "tenant tenant-0.ttft_p99_ms <= 1,000,000,000: it is" in capsys.readouterr().out
    assert main([*few, "--need", "interactive.ttft_p99_ms=60"]) == 0
    shown = capsys.readouterr().out.split("my+decode_batch_size=4:")[-1]
    assert "interactive.ttft_p99_ms <= 60: it is" in shown and "NOT MET" in shown
    assert "model_config.decode_batch_size: 4 -> 8: interactive.ttft_p99_ms" in shown
    assert "2 replicas in place of 1: interactive.ttft_p99_ms" in shown


@pytest.mark.parametrize(
    ("need", "message"),
    [
        ("ttft_p99", "--need must be FIGURE=LIMIT with a number >= 0. Given: 'ttft_p99'"),
        ("ttft_p99_ms=x", "--need must be FIGURE=LIMIT with a number >= 0. Given: 'ttft_p99_ms=x'"),
        ("ttft_p98_ms=4", "the nearest known figure is `ttft_p99_ms`. Given: 'ttft_p98_ms'"),
        ("tenant unknown.ttft_p99_ms=4", "must be of a class or a tenant that the load has requests of"),
    ],
)
def test_whatif_refuses_an_invalid_need(arguments, capsys, need, message):
    assert main([*arguments, "--need", need]) == 2
    assert message in capsys.readouterr().err


def test_whatif_writes_json(arguments, capsys):
    assert main([*arguments, "--json", "-"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["profile"]["measured"] is False
    assert first["figures"]["interactive.requests"] == 30
    assert first["figures"]["bound_violations"] == second["figures"]["bound_violations"] == 0


def test_whatif_json_on_standard_output_has_rates_and_needs_only(arguments, capsys, monkeypatch):
    monkeypatch.setattr(trial, "neighbours", lambda *asked: [])
    arguments[1] += "+request_classes.interactive.ttft_slo_s=0.1"
    asked = ["--find-rate", "--need", "interactive.ttft_p99_ms=60"]
    assert main([*arguments[:2], *arguments[3:], "--json", "-", *asked]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert only["highest_rate"]["is_highest"]
    assert only["highest_rate"]["requests_per_s"] > 20
    assert only["highest_rate"]["figures"]["requests"] == 40
    assert only["needs"][0].startswith("interactive.ttft_p99_ms <= 60: it is")


def test_highest_rate_is_measured_over_the_time_of_arrivals(arguments, tmp_path, capsys):
    late = "rate: 10, arrivals: fixed, requests: 31, begins_s: 90, prompt_tokens: 4, answer_tokens: 1"
    (tmp_path / "load.yaml").write_text(f"streams: {{chat: {{{late}}}}}\n")
    arguments[1] += "+request_classes.standard.ttft_slo_s=0.1"
    assert main([*arguments[:2], *arguments[3:], "--find-rate", "--json", "-"]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert only["highest_rate"]["requests_per_s"] == pytest.approx(10 * only["highest_rate"]["factor"])


def test_whatif_reports_extrapolated_steps_of_rates_and_needs(arguments, tmp_path, capsys, monkeypatch):
    every = trial.neighbours
    monkeypatch.setattr(trial, "neighbours", lambda *asked: list(every(*asked))[:2])
    write_profile(create_profile(measured_to={"rows": 1.0}), tmp_path / "profile.json")
    few = [arguments[0], f"{arguments[1]}+model_config.decode_batch_size=4", *arguments[3:]]
    assert main([*few, "--find-rate", "--need", "interactive.ttft_p99_ms=60"]) == 0
    shown = capsys.readouterr().out.splitlines()
    for words in ("x the first", "(sufficient)", "2 replicas in place of 1"):
        assert any("BEYOND WHAT WAS MEASURED" in line for line in shown if words in line), words


def test_whatif_finds_the_highest_rate(arguments, capsys):
    arguments[1] += "+request_classes.interactive.ttft_slo_s=0.1"
    assert main([*arguments[:2], *arguments[3:], "--find-rate"]) == 0
    shown = capsys.readouterr().out
    assert (
        "requests/s that meet the objectives of 99%:\n  my+interactive.ttft_slo_s=0.1: " in shown
        and "at least" not in shown
    )


def test_whatif_refuses_a_workload_too_short_for_the_highest_rate(arguments, tmp_path, capsys):
    few = "streams: {chat: {rate: 1, requests: 2, prompt_tokens: 4, answer_tokens: 1}}\n"
    (tmp_path / "load.yaml").write_text(few)
    assert main([*arguments[:2], *arguments[3:], "--find-rate"]) == 0
    shown = capsys.readouterr().out
    assert "  my: at least " in shown and "(256 x the load's" in shown and "add more `requests`" in shown


def test_whatif_compares_hardware_profiles(arguments, tmp_path, capsys):
    pieces = CostModel((CostTerm("step", STEP_S / 2), CostTerm("tokens", 0.00005)))
    write_profile(create_profile(step=pieces, name="int8", source="an estimate"), tmp_path / "int8.json")
    arguments[1] += "+request_classes.interactive.ttft_slo_s=0.03"
    arguments[2] = f"{arguments[1]}+@profile={tmp_path / 'int8.json'}"
    arguments.insert(3, f"{arguments[1]}+cluster_config.replicas=2")
    assert main([*arguments, "--find-rate"]) == 0
    shown = capsys.readouterr().out
    assert "NOT MEASURED: times of int8 are figures of an estimate" in shown
    (first, faster, two) = (line for line in shown.splitlines() if "x the first" in line)
    assert "1.00 x the first" in first
    assert float(faster.split(", ")[1].split(" x")[0]) > 1
    assert "replicas=2: " in two
    assert main([*arguments, "--json", str(tmp_path / "int8.json")]) == 2
    assert "int8.json: must not be one of the files that are read" in capsys.readouterr().err


def test_whatif_refuses_another_kind_of_workload(arguments, tmp_path, capsys):
    arguments[arguments.index("--load") + 1] = str(tmp_path / "load.csv")
    assert main(arguments) == 2
    assert "must be a workload (*.yaml), or a recording" in capsys.readouterr().err


def test_profile_is_made_from_a_recording(arguments, tmp_path, capsys):
    recorded(tmp_path / "recordings")
    assert main(["profile", str(tmp_path / "mine.json"), "--recording", str(tmp_path / "recordings")]) == 0
    assert "held out: error median" in capsys.readouterr().out
    arguments[arguments.index("--profile") + 1] = str(tmp_path / "mine.json")
    assert main(arguments) == 0
    assert "times of recordings: llm-serving profile --recording recordings" in capsys.readouterr().out


def test_profile_refuses_a_missing_output_folder(tmp_path, capsys):
    assert main(["profile", str(tmp_path / "no" / "mine.json"), "--model", "demo"]) == 2
    assert "mine.json: must be a file in an existing folder" in capsys.readouterr().err
    assert main(["profile", str(tmp_path), "--model", "demo"]) == 2
    assert f"{tmp_path}: must be a file in an existing folder" in capsys.readouterr().err
    (tmp_path / "my.yaml").write_text("{}\n")
    assert main(["profile", str(tmp_path / "my.yaml"), "--config", str(tmp_path / "my.yaml")]) == 2
    assert "my.yaml: must not be one of the files that are read" in capsys.readouterr().err
    assert main(["profile", str(tmp_path / "mine.json"), "--recording", str(tmp_path / "no.rec")]) == 2
    assert "no.rec: must be a recording (*.rec) or a folder of them" in capsys.readouterr().err


def test_profile_refuses_a_recording_without_all_answers():
    seen = [[ClientTiming("a", 0.0, [1.0]), ClientTiming("b", 0.0, [])], [ClientTiming("c", 2.0, [3.0])]]
    timings = Timings(arrivals={"a-0": 0.0, "c-0": 2.0})
    profile.check_recorded(timings, seen)
    timings.notices.append("x.rec: ends within a record")
    with pytest.raises(RecordingError, match=r"lacks 0 of 2 requests; x\.rec: ends within a record: there must"):
        profile.check_recorded(timings, seen)
    with pytest.raises(RecordingError, match="lacks 1 of 2 requests: there must be room for all of it in --keep, or"):
        profile.check_recorded(Timings(arrivals={"a-0": 0.0}), seen)


def test_profile_refuses_a_folder_in_use(tmp_path):
    with profile._folder(tmp_path / "kept") as folder:
        with pytest.raises(ConfigError, match="--keep must be a folder that is new or empty"):
            profile._folder(folder).__enter__()
        assert profile._read_clients(folder) == [], "as of one that is interrupted"


def test_whatif_error_names_the_configuration_of_a_change(arguments, capsys):
    arguments[2] = f"{arguments[1]}+scheduler_config.max_prefill_tokens=4"
    assert main(arguments) == 2
    message = (
        f"error: {arguments[2]}: --set: `scheduler_config.max_prefill_tokens` must be at least model_config.decode_"
    )
    assert message in capsys.readouterr().err


def test_whatif_refuses_a_recording_of_a_larger_vocabulary(arguments, tmp_path, capsys):
    recorded(tmp_path / "recordings")
    arguments[arguments.index("--load") + 1] = str(tmp_path / "recordings")
    (tmp_path / "my.yaml").write_text("model_config: {vocab_size: 30}\n")
    assert main(arguments) == 2
    message = (
        "recordings: must be a recording of the model that is simulated, which has 30 tokens; `--model none` simulates"
    )
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("config", ["", "my.yaml+@profile="])
def test_whatif_refuses_a_configuration_without_file(arguments, capsys, config):
    arguments[2] = config
    assert main(arguments) == 2
    message = f"CONFIG must be FILE, FILE+SECTION.KEY=VALUE or FILE+@profile=FILE. Given: '{config}'"
    assert message in capsys.readouterr().err


def test_plot_names_configurations_and_classes(arguments, tmp_path):
    pytest.importorskip("matplotlib")
    write_profile(create_profile(name="int8"), tmp_path / "int8.json")
    arguments.insert(3, f"{arguments[1]}+@profile={tmp_path / 'int8.json'}")
    load = (tmp_path / "load.yaml").rename(tmp_path / r"$\no$.yaml")
    arguments[arguments.index("--load") + 1] = str(load)
    assert main([*arguments, "--svg", str(tmp_path / "plot.svg")]) == 0
    plot = (tmp_path / "plot.svg").read_text()
    for name in ("my: ", "my+decode_batch_size=2: ", "my+profile=int8: ", "interactive", "batch", "NOT MEASURED"):
        assert f"<!-- {name}" in plot or f"; {name}" in plot, name
    assert "mathdefault" not in plot, "numbers of a logarithmic axis are numbers"
    assert main([*arguments, "--svg", str(tmp_path / "again.svg")]) == 0
    assert (tmp_path / "again.svg").read_text() == plot


def test_whatif_takes_a_file_whose_name_contains_a_plus(tmp_path):
    path = tmp_path / "a+b" / "my+config.yaml"
    path.parent.mkdir()
    path.write_text("pa_config: {num_blocks: 64}\nserving_config: {server_port: 8835}\n")
    argument = f"{path}+model_config.decode_batch_size=3+{'x' * 300}.y=1"
    assert list(whatif.input_files([f"{path}", argument])) == [path, path]
    variant = whatif.read_variant(argument.rpartition("+")[0], "none", create_profile(), 1)
    assert (variant.name, variant.config.model.decode_batch_size) == ("my+config+decode_batch_size=3", 3)
