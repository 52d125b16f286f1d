"""The comparison of servers of a GGUF file, with this server alone."""

import re

import pytest
from benchmarks import gguf_servers


def test_gguf_comparison_table_has_the_ratio_to_the_first_server() -> None:
    first = dict(zip(gguf_servers.FIGURES, (60.0, 1.5, 300.0, 800.0, 1000.0), strict=True))
    second = dict(zip(gguf_servers.FIGURES, (40.0, 4.5, 100.0, 1000.0, 1000.0), strict=True))
    lines = gguf_servers.table({"ours": first, "theirs": second}).splitlines()
    assert lines[0] == "|  | ours | theirs | times better |"
    assert [line.split(" | ")[-1] for line in lines[2:]] == ["1.50 |", "3.00 |", "3.00 |", "1.25 |", "1.00 |"]
    assert len(gguf_servers.table({"ours": first}).splitlines()[0].split("|")) == 4


def test_gguf_comparison_reports_the_median_of_each_figure() -> None:
    rounds = [dict.fromkeys(gguf_servers.FIGURES, value) for value in (3.0, 1.0, 2.0)]
    assert set(gguf_servers.medians(rounds).values()) == {2.0}


@pytest.mark.mindspore
def test_gguf_comparison_measures_a_server(monkeypatch, capsys) -> None:
    for name, value in {"_VOCABULARY": range(10, 2000), "_REPEATS": 1, "_AT_ONCE": 4}.items():
        monkeypatch.setattr(gguf_servers, name, value)
    settings = ("--set", "device_config.num_threads=1", "--set", "pa_config.num_blocks=256")
    assert gguf_servers.main(["--model", "demo", "--rounds", "1", *settings]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    values = [float(row.split("|")[2].replace(",", "")) for row in rows]
    assert len(values) == len(gguf_servers.FIGURES) and all(value > 0 for value in values)
    assert re.fullmatch(r"\| one stream, tok/s \| [0-9,.]+ \|", rows[0])


def test_gguf_comparison_shows_the_log_of_a_server_that_does_not_start(tmp_path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"no model")
    with pytest.raises(SystemExit, match=r"did not start:\n(.|\n)*a\.gguf"):
        gguf_servers.main(["--model", str(tmp_path / "a.gguf"), "--rounds", "1"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds must be at least 1. Given: 0"),
        (["--llama-server", "/none/llama-server"], "--llama-server must be an executable file. Given: /none/llama-"),
    ],
)
def test_gguf_comparison_refuses_options_before_it_starts_a_server(capsys, options, message) -> None:
    with pytest.raises(SystemExit, match="2"):
        gguf_servers.main(["--model", "demo", *options])
    assert message in capsys.readouterr().err
