"""load_config: precedence, sources, and errors that name file, line, key, rule and value."""

import json

import pytest
from llm_serving.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, ServerConfig, load_config
from llm_serving.config.paths import DEMO_FOLDER, PROJECT_FOLDER
from llm_serving.config.report import describe
from llm_serving.config.schema import RULES, TABLES
from llm_serving.core.request_class import DEFAULT_CLASSES
from llm_serving.errors import ConfigError
from support.model_folders import LLAMA, error_of, write_config, write_yaml

CONFIGS = PROJECT_FOLDER / "configs"


def test_config_without_a_file_has_default_values():
    config = load_config()
    assert (config.model, config.serving, config.pa) == (ModelConfig(), ServerConfig(), CacheConfig())
    assert (config.scheduler, config.device) == (SchedulerConfig(), DeviceConfig())
    assert (config.request_classes, config.api_keys) == (DEFAULT_CLASSES, ())
    rows = {f"request_classes.{row.name}.{key}" for row in DEFAULT_CLASSES for key in TABLES["request_classes"].rules}
    assert set(config.sources) == set(RULES) | rows
    assert set(config.sources.values()) == {"default"}
    assert config.notices == ()


def test_demo_cpu_yaml_loads_without_notices():
    config = load_config(CONFIGS / "demo_cpu.yaml")
    assert config.model.model_path == DEMO_FOLDER
    assert config.model.model_name == "demo"
    assert (config.model.max_generate_length, config.model.decode_batch_size) == (1024, 128)
    assert config.model.model_dtype == "bfloat16"
    assert (config.pa.num_blocks, config.pa.block_size) == (1024, 16)
    assert (config.serving.server_port, config.serving.agent_ports) == (8835, (16002,))
    assert config.notices == ()


def test_override_wins_over_file_and_later_override_over_earlier(tmp_path):
    path = write_yaml(tmp_path, "serving_config:\n    server_port: 1\n    server_ip: 0.0.0.0\n")
    config = load_config(path, ["serving_config.server_port=2", "serving_config.server_port=3"])
    assert (config.serving.server_port, config.serving.server_ip) == (3, "0.0.0.0")
    assert config.sources["serving_config.server_port"] == "--set"
    assert config.sources["serving_config.server_ip"] == f"{path}:3"
    assert config.sources["pa_config.block_size"] == "default"


def test_null_in_file_or_override_selects_the_default(tmp_path):
    path = write_yaml(tmp_path, "serving_config:\n    server_port: null\npa_config:\n    block_size: 32\nmodel_path:\n")
    config = load_config(path, ["pa_config.block_size=null"])
    assert (config.serving.server_port, config.pa.block_size) == (8835, 16)


def test_model_folder_supplies_missing_values(tmp_path):
    folder = write_config(tmp_path / "tiny llama")
    config = load_config(model=folder)
    model = config.model
    assert (model.model_path, model.model_name) == (folder, "tiny-llama")
    assert (model.vocab_size, model.end_token, model.pad_token_id) == (512, 2, 0)
    assert (model.max_generate_length, model.max_input_len) == (1024, 1024)
    assert config.sources["model_config.model_path"] == "--model"
    assert config.sources["model_config.vocab_size"] == "model config.json"


def test_several_end_tokens_of_the_model_are_kept(tmp_path):
    folder = write_config(tmp_path / "m", eos_token_id=[2, 5])
    assert load_config(model=folder).model.end_token is None
    assert load_config(None, ["model_config.end_token=5"], folder).model.end_token == 5
    assert "must be 2 or 5 as in" in error_of(None, "model_config.end_token=4", model=folder)


def test_model_option_wins_over_file(tmp_path):
    first, second = write_config(tmp_path / "first"), write_config(tmp_path / "second")
    path = write_yaml(tmp_path, f"model_config: {{model_path: {first}}}")
    assert load_config(path).model.model_path == first
    assert load_config(path, model=second).model.model_path == second


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("model_config.vocab_size=513", "`model_config.vocab_size` must be 512 as in"),
        ("model_config.end_token=3", "`model_config.end_token` must be 2 as in"),
        ("model_config.max_generate_length=1025", "must be <= 1024, the positions of the model"),
    ],
)
def test_contradiction_to_the_model_is_an_error(tmp_path, override, text):
    assert text in error_of(None, override, model=write_config(tmp_path / "m"))


def test_different_padding_token_is_a_notice(tmp_path):
    config = load_config(None, ["model_config.pad_token_id=7"], write_config(tmp_path / "m"))
    assert config.model.pad_token_id == 7
    assert [notice for notice in config.notices if "pad_token_id" in notice and "differs from 0" in notice]


def test_relative_path_is_resolved_from_the_file_first(tmp_path, monkeypatch):
    beside, started_in = tmp_path / "beside", tmp_path / "started_in"
    beside.mkdir()
    started_in.mkdir()
    monkeypatch.chdir(started_in)
    path = write_yaml(beside, "model_config: {model_path: m}")
    there = write_config(started_in / "m")
    assert load_config(path).model.model_path == there
    here = write_config(beside / "m")
    assert load_config(path).model.model_path == here


# Errors a user makes


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("model_config:\n    modle_name: x\n", 2, "unknown key `model_config.modle_name`; the nearest known one is"),
        ("model_config:\n    max_generate_len: 3\n", 2, "`model_config.max_generate_length`"),
        (
            "model_confg:\n    model_name: x\n",
            1,
            "unknown section `model_confg`; the nearest known one is `model_config`",
        ),
        ("model_config:\n    server_port: 3\n", 2, "it is known as `serving_config.server_port`"),
        (
            "pa_config:\n\n    block_size: 0\n",
            3,
            "`pa_config.block_size` must be an integer >= 1 and <= 1024. Given: 0",
        ),
        ("pa_config:\n    block_size: '16'\n", 2, "`pa_config.block_size` must be an integer"),
        ("pa_config:\n    block_size: yes\n", 2, "Given: True"),
        ("pa_config:\n    num_blocks: 1.5\n", 2, "must be an integer >= 1. Given: 1.5"),
        ("pa_config:\n    block_size: 16\n    block_size: 16\n", 3, "key 'block_size' is given twice"),
        ("pa_config: 7\n", 1, "must be a mapping of keys to values. Given: 7"),
        ("serving_config:\n    agent_ports: [1, 1]\n", 2, "each >= 1 and <= 65535. Given: [1, 1]"),
        ("serving_config:\n    agent_ports: []\n", 2, "`serving_config.agent_ports` must be"),
        (
            "serving_config:\n    max_buffered_bytes: 8000000\n",
            2,
            "`serving_config.max_buffered_bytes` must be at least twice max_request_body_bytes 4194304",
        ),
        ("serving_config:\n    max_url_bytes: 40000\n", 2, "must be less than max_header_bytes 32768"),
        (
            "serving_config:\n    idle_timeout_s: 0\n",
            2,
            "must be a number of seconds above 0 and at most 1e+06. Given: 0",
        ),
        ("serving_config:\n    load_timeout_s: 1.0e+300\n", 2, "above 0 and at most 1e+06. Given: 1e+300"),
        ("model_config:\n    model_dtype: int4\n", 2, "must be one of bfloat16, float16, float32. Given: 'int4'"),
        ("model_config:\n    batch_waiting_time: .nan\n", 2, "must be a number of seconds between 0 and 3600"),
        ("model_config:\n    batch_waiting_time: -1\n", 2, "Given: -1"),
        ("model_config:\n    model_name: a b\n", 2, "must be text of 1 to 128 letters"),
        ("model_config:\n    model_name: {a: b}\n", 2, "Given: {'a': 'b'}"),
        ("model_config:\n    model_path: nowhere\n", 2, "model_config.model_path: nowhere does not exist; searched in"),
        ("model_config:\n    model_cfg_path: nowhere.yaml\n", 2, "nowhere.yaml does not exist"),
        ("model_config:\n    model_cfg_path: [a]\n", 2, "`model_config.model_cfg_path` must be a path. Given: ['a']"),
        ("model_config:\n    model_path: ~nobody/x\n", 2, "~nobody/x does not exist"),
        (f"model_config:\n    model_path: {'x' * 500}\n", 2, "does not exist"),
        ("model_config:\n    model_path: ''\n", 2, "must be a path. Given: ''"),
        (
            "scheduler_config:\n    policy: best\n",
            2,
            "must be one of prefill_first, decode_first, mixed, throughput, fcfs. Given: ",
        ),
        ("scheduler_config:\n    enable_mixed_chunk: split\n", 2, "must be True or False. Given: 'split'"),
        ("scheduler_config:\n    slo_refusal_factor: 0.5\n", 2, "must be a number >= 1. Given: 0.5"),
        ("scheduler_config:\n    swap_block_cost_tokens: 0\n", 2, "must be a number of tokens above 0. Given: 0"),
        (
            "scheduler_config:\n    max_long_prefill_tokens: 4096\n    max_prefill_tokens: 2048\n",
            2,
            "must be <= scheduler_config.max_prefill_tokens",
        ),
        ("scheduler_config:\n    max_waiting_tokens: 4095\n", 2, "must be >= 4096, the longest prompt"),
        ("device_config:\n    max_device_memory: 2 apples\n", 2, "Given: '2 apples'"),
        (
            "model_path: /models/llama\n",
            1,
            "`model_path` must be a section; to name a model, set model_config.model_path",
        ),
        ("tokenizer:\n    tpye: x\n", 2, "the nearest known one is `tokenizer.type`"),
        ("a: [1\nb: 2\n", 2, "is not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "unknown section `a`"),
        ("pa_config:\n    block_size: !!python/name:os.system ''\n", 2, "is not valid YAML"),
        ("pa_config:\n    block_size: !!bool x\n", 2, "must match its YAML tag tag:yaml.org,2002:bool. Correct"),
        ("pa_config:\n    block_size: !!int ''\n", 2, "or remove the tag. Given: ''"),
        ("pa_config:\n    block_size: !!timestamp x\n", 2, "must match its YAML tag tag:yaml.org,2002:timestamp"),
    ],
)
def test_error_names_file_line_and_rule(tmp_path, text, line, message):
    path = write_yaml(tmp_path, text)
    error = error_of(path)
    assert error.startswith(f"{path}:{line}: ")
    assert message in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n- b\n", "must be a mapping of sections"),
        ("hello\n", "must be a mapping of sections. Given: 'hello'"),
        ("a: \x07\n", "is not valid YAML"),
        ("a: " + "[" * 500_000 + "\n", "must be nested at most 32 deep"),
        ("? " * 5000, "must be nested at most 32 deep"),
        ("a: " + "[" * 40 + "]" * 40 + "\n", "must be nested at most 32 deep"),
        ("a: &a [*a]\n", "must be nested at most 32 deep"),
        ("x" * (2**20 + 1), "must be at most 1048576 bytes"),
    ],
)
def test_invalid_file_is_refused(tmp_path, text, message):
    path = write_yaml(tmp_path, text)
    error = error_of(path)
    assert error.startswith(str(path))
    assert message in error


def test_yaml_aliases_are_resolved_within_a_size_limit(tmp_path):
    config = load_config(
        write_yaml(tmp_path, "pa_config: {num_blocks: &n 8}\nscheduler_config: {max_waiting_queue: *n}\n")
    )
    assert config.scheduler.max_waiting_queue == 8
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "must hold at most 20000 values" in error_of(write_yaml(tmp_path, "\n".join(lines)))


def test_yaml_merge_keys_are_overridden_by_own_keys(tmp_path):
    text = "pa_config: &pa {block_size: 32, num_blocks: 9}\n"
    path = write_yaml(tmp_path, text.replace("{block", "{<<: {block_size: 8, decode_seq_length: 4096}, block"))
    assert load_config(path).pa == CacheConfig(block_size=32, num_blocks=9, decode_seq_length=4096)


def test_config_error_names_a_missing_file_or_model_folder(tmp_path):
    assert error_of(tmp_path / "none.yaml") == f"{tmp_path}/none.yaml: cannot be read: No such file or directory"
    assert error_of(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    missing = tmp_path / "missing"
    assert error_of(None, model=missing) == f"--model: model_config.model_path: {missing} does not exist"
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in error_of(None, model=tmp_path / "empty")


@pytest.mark.parametrize("override", ["server_port=1", "serving_config.server_port", "a.b.c=1", "=1", ""])
def test_override_must_be_section_key_value(override):
    assert error_of(None, override).startswith("--set must be section.key=value. Given: ")


def test_override_error_names_an_unknown_key_or_invalid_value():
    assert error_of(None, "pa_config.blok_size=1") == (
        "--set: unknown key `pa_config.blok_size`; the nearest known one is `pa_config.block_size`"
    )
    assert error_of(None, "pa_config.block_size=x").startswith("--set: `pa_config.block_size` must be an integer")
    assert "is not valid YAML" in error_of(None, "pa_config.block_size=[")


def test_errors_do_not_echo_long_values():
    assert len(error_of(None, f"pa_config.block_size={'9' * 4000}")) < 300
    assert len(error_of(None, f"model_config.model_name='{'x ' * 40000}'")) < 300


# Older files


def test_max_buffered_bytes_grows_with_the_largest_body():
    config = load_config(None, [f"serving_config.max_request_body_bytes={2**27}"])
    assert config.serving.max_buffered_bytes == 2**28
    assert config.sources["serving_config.max_buffered_bytes"] == "twice max_request_body_bytes"


class TestDefaultContext:
    """The default context length is the model's, limited by memory."""

    @pytest.fixture
    def long_model(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 131072}))
        return tmp_path

    def load(self, model, *overrides):
        return load_config(None, overrides, model)

    def test_max_generate_length_is_that_of_the_model(self, long_model):
        config = self.load(long_model)
        assert (config.model.max_generate_length, config.model.max_input_len) == (131072, 131072)
        assert config.sources["model_config.max_generate_length"] == "model config.json"

    def test_max_generate_length_fits_the_blocks(self, long_model):
        config = self.load(long_model, "pa_config.num_blocks=100", "pa_config.block_size=32")
        assert config.model.max_generate_length == 3200
        assert config.sources["model_config.max_generate_length"] == (
            "room of pa_config.num_blocks 100 x block_size 32; model config.json: 131072"
        )
        assert config.notices == ()
        assert "max_generate_length: 3200" in describe(config)

    def test_max_generate_length_with_a_window_needs_only_its_blocks(self, tmp_path):
        sees = {"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "max_position_embeddings": 131072}
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **sees}))
        assert self.load(tmp_path, "pa_config.num_blocks=257").model.max_generate_length == 131072
        assert self.load(tmp_path, "pa_config.num_blocks=256").model.max_generate_length == 4096

    def test_max_generate_length_includes_rope_scaling(self, tmp_path):
        scaling = {"rope_scaling": {"type": "linear", "factor": 4.0}}
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 32768, **scaling}))
        config = self.load(tmp_path)
        assert config.model.max_generate_length == 131072
        source = "model config.json: 32768 x 4 by rope scaling linear"
        assert config.sources["model_config.max_generate_length"] == source
        assert self.load(tmp_path, "model_config.max_generate_length=131072").model.max_generate_length == 131072
        with pytest.raises(ConfigError, match=rf"must be <= 131072, the positions of the model \({source}\)"):
            self.load(tmp_path, "model_config.max_generate_length=131073")

    def test_longest_prompt_is_limited_by_max_waiting_tokens(self, long_model):
        config = self.load(long_model, "scheduler_config.max_waiting_tokens=20000")
        assert (config.model.max_generate_length, config.model.max_input_len) == (131072, 20000)
        with pytest.raises(ConfigError, match=r"must be >= 30000, the longest prompt"):
            self.load(long_model, "scheduler_config.max_waiting_tokens=20000", "model_config.max_generate_length=30000")

    def test_configured_max_generate_length_is_kept(self, long_model):
        config = self.load(long_model, "model_config.max_generate_length=512", "pa_config.num_blocks=10")
        assert config.model.max_generate_length == 512
        assert "holds a request of 160 tokens; a longer request is refused" in config.notices[0]


def test_max_input_len_is_the_largest_seq_length(tmp_path):
    config = load_config(None, ["model_config.seq_length=[128, 1024, 512]"])
    assert config.model.max_input_len == 1024
    config = load_config(None, ["model_config.seq_length=8192"])
    assert config.model.max_input_len == 4096
    assert "8192 is limited to max_generate_length 4096" in config.notices[0]


@pytest.mark.parametrize(
    ("override", "notice"),
    [
        ("pa_config.num_blocks=10", "holds a request of 160 tokens"),
        ("pa_config.decode_seq_length=100", "100 has no effect; max_generate_length 4096 applies"),
        ("model_config.backend=ge", "ge is served as kbk"),
        ("model_config.page_attention=False", "the KV cache is always paged"),
        ("model_config.prefill_batch_size=[1]", "1 allows one prompt in a prefill step"),
        ("scheduler_config.priority_ageing_steps=9", "each of the request_classes has its own ageing_steps"),
        ("model_config.model_type=dyn", "model_config.model_type is accepted without effect"),
    ],
)
def test_setting_with_a_surprising_effect_has_one_notice(override, notice):
    notices = load_config(None, [override]).notices
    assert len(notices) == 1
    assert notice in notices[0]


@pytest.mark.parametrize(
    ("written", "expected"),
    [("2GB", 2 * 2**30), ("1.5 gb", 3 * 2**29), ("512MB", 2**29), ("512m", 2**29), ("1048576", 2**20)],
)
def test_memory_size_may_have_a_unit(written, expected):
    assert load_config(None, [f"device_config.max_device_memory={written}"]).device.max_device_memory == expected


@pytest.mark.parametrize(
    "key", ["model_config.tokenizer_path", "device_config.save_graphs_path", "serving_config.server_ip"]
)
def test_config_error_for_text_that_is_no_unicode(tmp_path, key):
    section, _, name = key.partition(".")
    assert f"`{key}`" in error_of(write_yaml(tmp_path, f'{section}:\n  {name}: "a\\uD800"\n'))


def test_a_model_folder_whose_name_is_no_unicode_is_an_error(tmp_path):
    folder = tmp_path / "m\udcff"
    folder.symlink_to(DEMO_FOLDER)
    assert "`model_config.model_path` must be text that can be written in UTF-8" in error_of(None, model=folder)


@pytest.mark.parametrize("surrogate", ["\udcff", "\ud800"])
def test_an_override_that_is_no_unicode_is_an_error(surrogate):
    error = error_of(None, f"model_config.model_name={surrogate}")
    assert error.startswith("--set model_config.model_name: is not valid YAML")
