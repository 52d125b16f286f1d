"""The section `models`: rows, the sections that they override, and their shares of the machine."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from llm_serving.config import ServingConfig, load_config
from llm_serving.config.model_size import check_memory, model_size, needed_bytes
from llm_serving.config.reload import check_reload, read_again, read_all_again, row_of
from llm_serving.errors import ConfigError
from llm_serving.models.spec import ModelSpec
from support.adapter_factories import write_adapter
from support.fakes import DEMO_SPEC
from support.model_folders import write_config


def load(folder: Path, text: str, *overrides: str) -> ServingConfig:
    for name in ("one", "two"):
        if not (folder / name).exists():
            write_config(folder / name)
    path = folder / "several.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def error_of(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value)


TWO = "models:\n    one: {path: one}\n    two: {path: two}\n"


def test_rows_take_precedence_over_sections_and_options_over_rows(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "models:\n"
        "    one: {path: one, dtype: float32, aliases: [uno], model_config: {decode_batch_size: 3}}\n"
        "    two: {path: two, replicas: 2, quantization: w8a16, load: false, pa_config: {block_size: 32}}\n"
        "model_config: {decode_batch_size: 7, model_dtype: bfloat16}\n"
        "scheduler_config: {record_path: records, max_waiting_queue: 5}\n"
        "api_keys: {me: {key_sha256: '" + "a" * 64 + "'}}\n",
        "scheduler_config.max_waiting_queue=6",
    )
    one, two = config.models
    assert (one.model.model_name, two.model.model_name) == ("one", "two")
    assert (one.model.model_aliases, two.model.model_aliases) == (("uno",), ())
    assert (one.model.decode_batch_size, two.model.decode_batch_size) == (3, 7)
    assert (one.model.model_dtype, two.model.model_dtype) == ("float32", "bfloat16")
    assert (one.num_replicas, two.num_replicas) == (1, 2)
    assert (one.quant.quantization, two.quant.quantization) == (None, "w8a16")
    assert (one.pa.block_size, two.pa.block_size) == (16, 32)
    assert (one.load_at_start, two.load_at_start) == (True, False)
    assert [each.scheduler.max_waiting_queue for each in config.models] == [6, 6]
    assert [each.scheduler.record_path for each in config.models] == [Path("records/one"), Path("records/two")]
    assert [each.serving.start_device_id for each in config.models] == [0, 1]
    cores = len(os.sched_getaffinity(0))
    assert {each.device.num_threads for each in config.models} == {max(1, cores // 3)}
    assert [key.name for key in one.api_keys] == [key.name for key in two.api_keys] == ["me"]
    assert (config.model, config.serving) == (one.model, one.serving), "the first model is the default"


def test_adapters_belong_to_their_model_and_have_names_of_their_own(tmp_path: Path) -> None:
    for name in ("sql", "poems"):
        write_adapter(tmp_path / name, DEMO_SPEC, targets=("q_proj",))
    one = f"one: {{path: one, aliases: [uno], lora_config: {{lora_modules: {{sql: {tmp_path / 'sql'}}}}}}}"
    poems = f"lora_modules: {{%s: {tmp_path / 'poems'}}}, max_loras: 2"

    def text(name: str) -> str:
        return f"models:\n    {one}\n    two: {{path: two, lora_config: {{{poems % name}}}}}\n"

    first, second = load(tmp_path, text("poems")).models
    assert [[*(each.lora.lora_modules or ())] for each in (first, second)] == [["sql"], ["poems"]]
    assert [each.lora.max_loras for each in (first, second)] == [4, 2]
    for name in ("one", "uno", "sql"):
        rule = f"names, aliases and adapters in `models` must differ. Given: {name!r} in one and two"
        assert rule in error_of(tmp_path, text(name))
    own = text("poems").replace("{sql:", "{uno:")
    assert "must have other names than `model_config.model_name` and `model_aliases`" in error_of(tmp_path, own)


def test_memory_is_shared_equally_or_as_given(tmp_path: Path) -> None:
    assert [each.memory_share for each in load(tmp_path, TWO).models] == [0.5, 0.5]
    text = "models:\n    one: {path: one}\n    two: {path: two, memory_share: 0.2}\n"
    assert [each.memory_share for each in load(tmp_path, text).models] == [0.8, 0.2]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("models:\n    one: {}\n", ":2: `models.one.path` must be given: a folder, or a name on a hub"),
        ("models:\n    'a b': {path: one}\n", "a name in `models` must be text of 1 to 128 letters"),
        (
            "models:\n    one: {path: one, replica: 2}\n",
            "unknown key `models.one.replica`; the nearest known one is `replicas`",
        ),
        ("models:\n    one: {path: one, serving_config: {}}\n", "unknown key `models.one.serving_config`"),
        ("models:\n    one: {path: one, memory_share: 2}\n", "`models.one.memory_share` must be a number above 0"),
        (
            "models:\n    one: {path: one, memory_share: 1}\n    two: {path: two}\n",
            "below 1 in total. Given: 1",
        ),
        ("models:\n    one: {path: one, load: false}\n", "`models.one.load` must be true for the first model"),
        (
            "models:\n    one: {path: one, aliases: [two]}\n    two: {path: two}\n",
            "differ. Given: 'two' in one and",
        ),
        ("models:\n    one: {path: one, model_config: {model_name: x}}\n", "must be left out: the row's name"),
        (TWO + "model_config: {model_path: one}\n", "`model_config.model_path` must be given in the rows of `models`"),
        ("models:\n    one: {path: gone}\n", "several.yaml:2: model_config.model_path: gone does not exist"),
        (TWO + "cluster_config: {engine: ray}\n", "`cluster_config.engine` must be local with `models`. Given: ray"),
    ],
)
def test_errors_name_the_place_the_rule_and_the_value(tmp_path: Path, text: str, error: str) -> None:
    assert error in error_of(tmp_path, text)


def test_the_option_for_one_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "several.yaml"
    load(tmp_path, TWO)
    with pytest.raises(ConfigError, match="--model must not be given with `models`"):
        load_config(path, (), "one")


def test_a_row_is_read_again_by_its_name(tmp_path: Path) -> None:
    running = load(tmp_path, TWO).models[1]
    load(tmp_path, TWO + "scheduler_config: {max_waiting_queue: 9}\n")
    read = read_again(running)
    assert [str(each) for each in check_reload(running, running, read)] == [
        f"scheduler_config.max_waiting_queue: {running.scheduler.max_waiting_queue} -> 9"
    ]
    load(tmp_path, TWO.replace("path: two", "path: one"))
    with pytest.raises(ConfigError, match=r"only POST /v1/models/two/replace or a restart changes model_config"):
        check_reload(running, running, read_again(running))
    load(tmp_path, "models:\n    one: {path: one}\n")
    with pytest.raises(ConfigError, match=r"its rows are one\. Given: two"):
        read_again(running)
    with pytest.raises(ConfigError, match=r"its rows are one\. Given: other"):
        row_of(read_all_again(running), "other")


def test_memory_error_names_the_need_of_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = load(tmp_path, TWO.replace("path: two", "path: two, pa_config: {num_blocks: 134000000}")).models
    assert needed_bytes(models[0]) < needed_bytes(models[1])
    check_memory(models[:1])
    with pytest.raises(ConfigError, match=r"`models` must fit into the .* of free memory; .*: one [\d.]+ GB, two "):
        check_memory(models)
    need = needed_bytes(models[0])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=need + 10**9))
    check_memory(models[:1], 10**9)
    with pytest.raises(
        ConfigError, match=r"of which loaded models have reserved 1\.00 GB for their KV caches; they need .*: one"
    ):
        check_memory(models[:1], 10**9 + 1)


def test_needed_memory_counts_the_slots_of_adapters(tmp_path: Path) -> None:
    one, two = load(tmp_path, TWO.replace("path: two", f"path: two, lora_config: {{lora_folder: {tmp_path}}}")).models
    spec = ModelSpec.from_folder(tmp_path / "two")
    assert needed_bytes(two) - needed_bytes(one) == spec.adapter_bytes(4, 16, 2) > 0
    assert not any("adapters" in line for line in model_size(one).lines)
    assert any("slots of adapters" in line for line in model_size(two).lines)
