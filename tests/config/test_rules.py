"""Rules refuse values of another type or out of range."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_serving.config import load_config
from llm_serving.config.schema import DEFAULTS, RULES, TABLES
from llm_serving.errors import ConfigError

ROW_RULES = {f"{section}.{key}": rule for section, table in TABLES.items() for key, rule in table.rules.items()}

scalars = st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=20)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3)
)


@given(name=st.sampled_from(sorted(RULES | ROW_RULES)), value=anything)
def test_a_rule_returns_its_type_or_raises_value_error(name, value):
    try:
        parsed = (RULES | ROW_RULES)[name].parse(value)
    except ValueError:
        return
    default = DEFAULTS.get(name)
    if default is not None:
        assert type(parsed) is type(default) or isinstance(parsed, type(default))
    if isinstance(parsed, float):
        assert math.isfinite(parsed)


def test_every_default_satisfies_its_rule():
    for name, rule in RULES.items():
        default = DEFAULTS[name]
        if default not in (None, ()):
            assert rule.parse(list(default) if isinstance(default, tuple) else default) == default, name


@pytest.mark.parametrize(
    ("override", "expected"),
    [("-", Path("-")), ('"-"', Path("-")), ("logs/access.log", Path("logs/access.log")), ("null", None)],
)
def test_dash_selects_standard_output_in_any_yaml_style(override, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    assert load_config(None, [f"serving_config.access_log={override}"]).serving.access_log == expected


@pytest.mark.parametrize("override", ["[]", "[null, null]", "3", "{}"])
def test_access_log_must_be_a_path_or_a_dash(override):
    with pytest.raises(ConfigError, match=r"`serving_config\.access_log` must be a path or -"):
        load_config(None, [f"serving_config.access_log={override}"])


@pytest.mark.parametrize(
    ("text", "expected"), [("1e-9", 1e-9), ("1E3", 1000.0), ("1.5e+1", 15.0), (".5e0", 0.5), ("+2.e0", 2.0)]
)
def test_a_number_may_have_an_exponent_without_point_or_sign(text, expected):
    assert load_config(None, [f"serving_config.restart_wait_s={text}"]).serving.restart_wait_s == expected


@pytest.mark.parametrize("text", ["1e400", "-1e-9", "1e", "e5", "1e5s"])
def test_a_number_with_an_exponent_keeps_to_the_rule(text):
    with pytest.raises(ConfigError, match=rf"`serving_config\.restart_wait_s` must be a number.*Given: '{text}'"):
        load_config(None, [f"serving_config.restart_wait_s={text}"])
