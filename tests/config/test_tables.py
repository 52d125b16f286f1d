"""`request_classes` and `api_keys`: named rows, from files and from the command line."""

from pathlib import Path

import pytest
from llm_serving.config import ServingConfig, load_config
from llm_serving.core.request_class import DEFAULT_CLASSES, RequestClass
from llm_serving.errors import ConfigError

HASH = "0a" * 32
OTHER_HASH = "0b" * 32


def load(folder: Path, text: str, *overrides: str) -> ServingConfig:
    path = folder / "serving.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def error_of(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value)


def test_configured_classes_replace_the_default_ones_ordered_by_rank(tmp_path):
    config = load(
        tmp_path,
        "request_classes:\n"
        "    slow: {rank: 7, max_running_share: 0.25, ttft_slo_s: null}\n"
        "    fast: {rank: -7, weight: 3, ageing_steps: 9, ttft_slo_s: 1, tpot_slo_s: 0.5, max_waiting: 4}\n",
    )
    assert config.request_classes == (
        RequestClass(name="fast", rank=-7, weight=3, ageing_steps=9, ttft_slo_s=1.0, tpot_slo_s=0.5, max_waiting=4),
        RequestClass(name="slow", rank=7, max_running_share=0.25),
    )
    assert config.sources["request_classes.fast.weight"] == f"{tmp_path}/serving.yaml:3"
    assert config.sources["request_classes.slow.weight"] == "default"


@pytest.mark.parametrize("text", ["request_classes:\n", "request_classes: null\n", "pa_config:\n"])
def test_an_empty_section_leaves_the_default_classes(tmp_path, text):
    assert load(tmp_path, text).request_classes == DEFAULT_CLASSES


def test_single_keys_can_be_overridden(tmp_path):
    overrides = ["request_classes.batch.weight=2", "request_classes.standard.ttft_slo_s=null"]
    config = load_config(None, overrides)
    interactive, standard, batch = config.request_classes
    assert interactive == DEFAULT_CLASSES[0]
    assert (standard.ttft_slo_s, standard.weight) == (None, 4)
    assert (batch.weight, batch.ageing_steps) == (2, 1024)
    assert config.sources["request_classes.batch.weight"] == "--set"
    text = "request_classes:\n    only: {rank: 0, weight: 5}\n"
    (only,) = load(tmp_path, text, "request_classes.only.weight=6").request_classes
    assert only.weight == 6


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback_address_has_no_class_limit(address):
    config = load_config(None, [f"serving_config.server_ip={address!r}"])
    assert config.serving.anonymous_highest_class is None


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.1.2.3", "server.example"])
def test_public_address_without_keys_limits_clients_to_the_class_of_priority_0(address):
    name = "serving_config.anonymous_highest_class"
    overrides = [f"serving_config.server_ip={address!r}"]
    config = load_config(None, overrides)
    assert config.serving.anonymous_highest_class == "standard"
    assert config.sources[name] == "serving_config.server_ip is not a loopback address"
    given = load_config(None, [*overrides, f"{name}=interactive"])
    assert (given.serving.anonymous_highest_class, given.sources[name]) == ("interactive", "--set")
    with_keys = load_config(None, [*overrides, f"api_keys.me.key_sha256={HASH}"])
    assert with_keys.serving.anonymous_highest_class is None


def test_anonymous_highest_class_must_be_the_name_of_a_class():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["serving_config.anonymous_highest_class=standart"])
    assert str(caught.value) == (
        "--set: `serving_config.anonymous_highest_class` must be the name of a class; the nearest known one is "
        "`standard`. Given: standart"
    )


def test_api_key_is_no_admin_by_default():
    overrides = [f"api_keys.me.key_sha256={HASH}", f"api_keys.root.key_sha256={OTHER_HASH}", "api_keys.root.admin=True"]
    assert [key.admin for key in load_config(None, overrides).api_keys] == [False, True]


def test_an_override_can_add_a_row(tmp_path):
    config = load_config(None, ["request_classes.vip.rank=-5", f"api_keys.me.key_sha256={HASH.upper()}"])
    assert [each.name for each in config.request_classes] == ["vip", "interactive", "standard", "batch"]
    assert [(key.name, key.key_sha256, key.highest_class) for key in config.api_keys] == [("me", HASH, None)]


@pytest.mark.parametrize(
    "override", ["request_classes.batch=1", "request_classes=1", "request_classes.a.b.c=1", "api_keys.me"]
)
def test_an_override_of_a_table_names_row_and_key(tmp_path, override):
    assert error_of(tmp_path, "pa_config:\n", override) == f"--set must be section.row.key=value. Given: {override!r}"


CLASSES = "request_classes:\n    a:\n        rank: 0\n    b:\n"
KEYS = "api_keys:\n    a:\n        key_sha256: " + HASH + "\n    b:\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (CLASSES + "        rank: 0\n", 5, "`request_classes.b.rank` must differ from the value of `a` at "),
        (CLASSES + "        weight: 2\n", 4, "`request_classes.b.rank` must be given; the other rows are 'a'"),
        (CLASSES + "        rank: null\n", 5, "`request_classes.b.rank` must be given"),
        (CLASSES, 4, "`request_classes.b.rank` must be given"),
        (CLASSES + "        rank: 1.5\n", 5, "`request_classes.b.rank` must be an integer >= -1000000"),
        (CLASSES + "        wieght: 2\n", 5, "the nearest known one is `request_classes.b.weight`"),
        (CLASSES + "        name: c\n", 5, "unknown key `request_classes.b.name`"),
        (
            CLASSES + "        rank: 1\n        service_tier: x\n    c: {rank: 2, service_tier: x}\n",
            7,
            "`request_classes.c.service_tier` must differ from the value of `b` at ",
        ),
        (CLASSES + "        weight: 0\n", 5, "`request_classes.b.weight` must be an integer >= 1"),
        (CLASSES + "        ageing_steps: 0\n", 5, "must be an integer >= 1"),
        (CLASSES + "        ttft_slo_s: 0\n", 5, "`request_classes.b.ttft_slo_s` must be a number of seconds above 0"),
        (CLASSES + "        tpot_slo_s: .inf\n", 5, "must be a number of seconds above 0. Given: inf"),
        (CLASSES + "        max_waiting: 0\n", 5, "must be an integer >= 1"),
        (CLASSES + "        max_running_share: 0\n", 5, "must be a number above 0 and at most 1. Given: 0"),
        (CLASSES + "        max_kv_share: 1.01\n", 5, "must be a number above 0 and at most 1. Given: 1.01"),
        ("request_classes:\n    Batch: {rank: 1}\n", 2, "a name in `request_classes` must be 1 to 32 lowercase"),
        ("request_classes:\n    " + "x" * 33 + ": {rank: 1}\n", 2, "must be 1 to 32 lowercase letters"),
        ("request_classes:\n    a: 5\n", 2, "must be a mapping of keys to values. Given: 5"),
        ("request_classes: [a]\n", 1, "must be a mapping of keys to values"),
        ("request_classes: {}\n", 1, "`request_classes` must have at least one row, or be left out"),
        ("request_clases:\n    a: {rank: 1}\n", 1, "the nearest known one is `request_classes`"),
        (KEYS, 4, "`api_keys.b.key_sha256` must be given"),
        (
            KEYS + f"        key_sha256: {HASH.upper()}\n",
            5,
            "`api_keys.b.key_sha256` must differ from the value of `a`",
        ),
        (
            KEYS + f"        key_sha256: {OTHER_HASH}\n        highest_class: bach\n",
            6,
            "known one is `batch`. Given: bach",
        ),
        (KEYS + "        max_waiting: -1\n", 5, "`api_keys.b.max_waiting` must be an integer >= 1"),
        (KEYS + "        key: sesame\n", 5, "the nearest known one is `api_keys.b.key_sha256`"),
    ],
)
def test_error_names_file_line_and_rule(tmp_path, text, line, message):
    error = error_of(tmp_path, text)
    assert error.startswith(f"{tmp_path}/serving.yaml:{line}: ")
    assert message in error


@pytest.mark.parametrize("written", ["sesame-open-the-door", "'" + "g" * 64 + "'"])
def test_a_key_written_in_place_of_its_hash_is_not_repeated(tmp_path, written):
    error = error_of(tmp_path, f"api_keys:\n    a:\n        key_sha256: {written}\n")
    assert "`api_keys.a.key_sha256` must be the SHA-256 of a key" in error
    assert written.strip("'") not in error


def test_rows_may_share_keys_by_alias(tmp_path):
    text = "request_classes:\n    a: &a {rank: 0, weight: 9}\n    b: {<<: *a, rank: 1}\n"
    assert [(each.rank, each.weight) for each in load(tmp_path, text).request_classes] == [(0, 9), (1, 9)]


def test_surprising_classes_have_one_notice(tmp_path):
    (notice,) = load(tmp_path, "request_classes:\n    a: {rank: 3}\n").notices
    assert notice.startswith(f"{tmp_path}/serving.yaml:2: request_classes.a.rank: 3 is the least rank and above 0")
    text = "request_classes:\n    a: {rank: 0}\nscheduler_config:\n    slo_refusal_factor: 2\n"
    (notice,) = load(tmp_path, text).notices
    assert "slo_refusal_factor: has no effect: no class has a ttft_slo_s" in notice


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("serving_config:\n    server_ip: 0.0.0.0\n", True),
        ("serving_config:\n    server_ip: llm.example\n", True),
        ("serving_config:\n    server_ip: '::'\n", True),
        ("serving_config:\n    server_ip: localhost\n", False),
        ("serving_config:\n    server_ip: 127.1.2.3\n", False),
        ("serving_config:\n    server_ip: '::1'\n", False),
        (f"serving_config:\n    server_ip: 0.0.0.0\napi_keys:\n    a: {{key_sha256: {'a' * 64}}}\n", False),
    ],
)
def test_public_address_without_keys_has_a_notice(tmp_path, text, expected):
    assert any("EVERY client" in notice for notice in load(tmp_path, text).notices) == expected


@pytest.mark.parametrize("value", ["https://chat.example.com/", "chat.example.com", "[1]", "{a: b}", "['*', 'x y']"])
def test_invalid_origin_is_refused(tmp_path, value):
    with pytest.raises(ConfigError, match=r"`serving_config.cors_origins` must be a list of origins"):
        load(tmp_path, f"serving_config:\n    cors_origins: {value}\n")


def test_cors_origins_hosts_and_key_limits_are_read(tmp_path):
    text = "serving_config:\n    cors_origins: ['https://a.example:8443', 'null']\n    allowed_hosts: proxy.lan\n"
    row = f"api_keys:\n    a: {{key_sha256: {'a' * 64}, max_requests_per_minute: 60, max_tokens_per_minute: 100000}}\n"
    config = load(tmp_path, text + row)
    assert config.serving.cors_origins == ("https://a.example:8443", "null")
    assert config.serving.allowed_hosts == ("proxy.lan",)
    assert (config.api_keys[0].max_requests_per_minute, config.api_keys[0].max_tokens_per_minute) == (60, 100000)
