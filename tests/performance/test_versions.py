from __future__ import annotations

import sys

import pytest
from benchmarks.versions import parse, settings_of, sign_test, summary


@pytest.mark.parametrize(
    ("wins", "pairs", "chance"), [(5, 10, 1.0), (8, 10, 0.109375), (2, 10, 0.109375), (10, 10, 2 / 1024), (1, 1, 1.0)]
)
def test_sign_test_returns_the_two_sided_probability(wins, pairs, chance):
    assert sign_test(wins, pairs) == pytest.approx(chance)


def test_version_ratio_is_computed_within_pairs():
    # The machine became four times as fast in the middle; within each pair this version is faster by a tenth.
    line = summary("C", [(110.0, 100.0), (220.0, 200.0), (440.0, 400.0)])
    assert line.startswith("C         220.0 tok/s, other     200.0; ratio 1.100 (1.100-1.100); faster in 3 of 3 pairs")


def test_version_comparison_applies_other_set_to_the_other_version_only():
    arguments = parse(["--model", "demo", "--set", "a.both=1", "--other-set", "a.other=2", "--quantization", "w8a8"])
    this, other = settings_of(arguments)
    assert {"a.both=1", "quant_config.quantization=w8a8", "pa_config.num_blocks=2304"} <= set(this)
    assert other == [*this, "a.other=2"]
    assert arguments.other == sys.executable


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--tests", "A,Q", "must be A, C or B with a number of requests"),
        ("--pairs", "1", "must be an integer >= 2. Given: 1"),
    ],
)
def test_version_comparison_refuses_an_invalid_option_before_it_loads_a_model(option, value, rule, capsys):
    with pytest.raises(SystemExit):
        parse(["--model", "demo", option, value])
    assert rule in capsys.readouterr().err
