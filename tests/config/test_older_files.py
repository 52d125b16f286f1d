"""Files of other servers: an older pair of serving YAML and MindFormers YAML, whose keys and values are accepted."""

import re
from pathlib import Path

import pytest
from llm_serving.config import CacheConfig, DeviceConfig, ModelConfig, load_config
from llm_serving.config.paths import PROJECT_FOLDER
from support.model_folders import error_of, write_config, write_yaml

LEGACY = PROJECT_FOLDER / "configs" / "llama" / "llama_7b_kbk_pa_dyn.yaml"


def test_names_of_mindie_are_accepted(tmp_path):
    text = "scheduler_config: {policy: throughput, prefillTimeMsPerReq: 100, decodeTimeMsPerReq: 7}\n"
    scheduler = load_config(write_yaml(tmp_path, text)).scheduler
    assert (scheduler.prefill_time_ms_per_req, scheduler.decode_time_ms_per_req) == (100.0, 7.0)


def test_legacy_pair_loads_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(LEGACY)
    assert config.model == ModelConfig(
        model_name="llama_7b",
        model_cfg_path=LEGACY.parent / "predict_llama2_7b.yaml",
        max_generate_length=4096,
        seq_length=(4096,),
        vocab_size=32000,
        end_token=2,
        pad_token_id=0,
        prefill_batch_size=1,
        decode_batch_size=128,
        model_dtype="float16",
    )
    assert config.pa == CacheConfig(num_blocks=1024, block_size=16, decode_seq_length=4096)
    assert config.device == DeviceConfig(
        device_target="Ascend",
        max_device_memory=58 * 2**30,
        graph_kernel_flags="--disable_expand_ops=Softmax,Dropout --enable_parallel_fusion=true "
        "--reduce_fuse_depth=8 --enable_auto_tensor_inplace=true",
    )
    assert config.sources["device_config.device_target"] == f"{LEGACY.parent}/predict_llama2_7b.yaml:4"


def test_each_key_without_effect_has_one_notice():
    notices = load_config(LEGACY).notices
    for key in (
        "model_config.zactivate_len",
        "model_config.model_type",
        "model_config.seq_type",
        "model_config.current_index",
        "model_config.decode_batch_waiting_time",
        "tokenizer.type",
        "tokenizer.vocab_file",
        "basic_inputs.type",
        "extra_inputs.type",
        "warmup_inputs.type",
        "model_config.prefill_batch_size",
        "context.max_call_depth",
        "model.model_config.batch_size",
        "device_config.enable_graph_kernel",
    ):
        assert len([notice for notice in notices if key in notice]) == 1, key
    assert len(notices) == 13


def test_model_path_section_of_older_files_is_accepted(tmp_path):
    keys = "prefill_model decode_model argmax_model topk_model prefill_ini decode_ini post_model_ini".split()
    path = write_yaml(tmp_path, "model_path:\n" + "".join(f"    {key}: [a.mindir]\n" for key in keys))
    without_meaning = [f"model_path.{key}" for key in keys if key != "decode_ini"]
    reported = [notice.split()[1] for notice in load_config(path).notices]
    assert reported == [*without_meaning, "model_config.mindir_ini:"]


@pytest.mark.parametrize("section", ["model_config", "serving_config"])
def test_waiting_times_are_read_from_both_sections(tmp_path, section):
    path = write_yaml(tmp_path, f"{section}:\n    batch_waiting_time: 0.5\n    decode_batch_waiting_time: 1\n")
    config = load_config(path)
    assert config.model.batch_waiting_time == 0.5
    assert any("decode_batch_waiting_time" in notice for notice in config.notices)
    assert config.sources["model_config.batch_waiting_time"] == f"{path}:2"


def test_waiting_times_that_disagree_are_an_error(tmp_path):
    text = "model_config:\n    batch_waiting_time: 0.5\nserving_config:\n    batch_waiting_time: {}\n"
    assert load_config(write_yaml(tmp_path, text.format(0.5))).model.batch_waiting_time == 0.5
    path = write_yaml(tmp_path, text.format(0.25))
    assert error_of(path) == (
        f"{path}:4: `serving_config.batch_waiting_time` must agree with {path}:2, "
        "which sets the same key to 0.5. Given: 0.25"
    )


@pytest.mark.parametrize(
    ("key", "value"), [("block_size", 32), ("num_blocks", 512), ("vocab_size", 100), ("eos_token_id", 3)]
)
def test_two_files_that_disagree_are_an_error_naming_both_lines(tmp_path, key, value):
    write_yaml(tmp_path, f"model:\n  model_config:\n    {key}: {value}\n", "model.yaml")
    text = "model_config: {model_cfg_path: model.yaml,\n  vocab_size: 32000, end_token: 2}\n"
    path = write_yaml(tmp_path, text + "pa_config:\n  {block_size: 16, num_blocks: 1024}\n")
    error = error_of(path)
    assert error.startswith(f"{path}:{4 if key in ('block_size', 'num_blocks') else 2}: ")
    assert f"`model.model_config.{key}` at {tmp_path}/model.yaml:3 is {value}" in error


def test_mindformers_file_supplies_only_missing_values(tmp_path):
    write_yaml(
        tmp_path,
        "context: {device_target: CPU, mode: 1, save_graphs_path: g, jit_config: {jit_level: O1}}\n"
        "model: {model_config: {block_size: 32, num_blocks: 64, compute_dtype: float32, theta: 1e6}}\n"
        "trainer: {type: x}\n",
        "model.yaml",
    )
    path = write_yaml(tmp_path, "model_config: {model_cfg_path: model.yaml, model_dtype: bfloat16}")
    config = load_config(path, ["pa_config.num_blocks=128"])
    assert (config.pa.block_size, config.pa.num_blocks) == (32, 128)
    assert config.model.model_dtype == "bfloat16"
    assert (config.device.save_graphs_path, config.device.jit_level) == (Path("g"), "O1")
    assert config.notices[0] == f"{tmp_path}/model.yaml:1: context.mode is read as 0: the network runs in graph mode"
    assert config.notices[1] == f"{tmp_path}/model.yaml: accepted without effect: trainer"


def test_mindformers_checkpoint_folder_is_the_model(tmp_path):
    folder = write_config(tmp_path / "weights")
    write_yaml(tmp_path, "model: {model_config: {checkpoint_name_or_path: weights}}", "model.yaml")
    path = write_yaml(tmp_path, "model_config: {model_cfg_path: model.yaml}")
    assert load_config(path).model.model_path == folder
    write_yaml(tmp_path, "model: {model_config: {checkpoint_name_or_path: llama.ckpt}}", "model.yaml")
    config = load_config(path)
    assert config.model.model_path is None
    assert "'llama.ckpt' is no folder in Hugging Face form" in config.notices[0]


def test_mindformers_shape_must_be_that_of_the_model(tmp_path):
    shape = "hidden_size: 64, num_layers: 2, num_heads: 4, n_kv_heads: {}, vocab_size: 512, intermediate_size: 128"
    folder = write_config(tmp_path / "m")
    path = write_yaml(tmp_path, "model_config: {model_cfg_path: model.yaml}")
    write_yaml(tmp_path, f"model: {{model_config: {{{shape.format(2)}}}}}", "model.yaml")
    assert load_config(path, model=folder).model.vocab_size == 512
    write_yaml(tmp_path, f"model: {{model_config: {{{shape.format(4)}}}}}", "model.yaml")
    assert "describes a model with num_key_value_heads 4, but" in error_of(path, model=folder)


@pytest.mark.parametrize(
    ("written", "own", "message"),
    [
        ("theta: 10000.0", {}, ""),
        ("theta: 1000000.0", {}, "rope_theta 1000000.0, but .*config.json says 10000.0;"),
        ("theta: 500000.0", {"rope_theta": 500000}, ""),
        ("seq_length: 64", {"rope_theta": 500000}, ""),  # it says nothing of it
        ("seq_length: 64", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ""),
        ("extend_method: PI, scaling_factor: 2.0", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ""),
        ("extend_method: PI, scaling_factor: 2.0", {}, "rope_scaling linear factor 2.0, but .* says none;"),
        (
            "extend_method: None",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling none, but .* says llama3 factor 8.0;",
        ),
        (
            "extend_method: LLAMA3, scaling_factor: {factor: 8.0, low_freq_factor: 2.0}",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling llama3 factor 8.0 low 2.0, but .* says llama3 factor 8.0;",
        ),
    ],
)
def test_mindformers_rotation_must_be_that_of_the_model(tmp_path, written, own, message):
    shape = "hidden_size: 64, num_layers: 2, num_heads: 4, n_kv_heads: 2, vocab_size: 512, intermediate_size: 128"
    folder = write_config(tmp_path / "m", **own)
    path = write_yaml(tmp_path, "model_config: {model_cfg_path: model.yaml}")
    write_yaml(tmp_path, f"model: {{model_config: {{{shape}, {written}}}}}", "model.yaml")
    if message:
        assert re.search(message, error_of(path, model=folder))
    else:
        assert load_config(path, model=folder).model.vocab_size == 512


def test_list_of_batch_sizes_selects_the_largest(tmp_path):
    path = write_yaml(tmp_path, "model_config: {decode_batch_size: [1, 128, 8], prefill_batch_size: [2, 4]}")
    model = load_config(path).model
    assert (model.decode_batch_size, model.prefill_batch_size) == (128, 4)


def test_existing_vocab_file_is_the_tokenizer(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    path = write_yaml(tmp_path, "tokenizer: {vocab_file: tokenizer.model}")
    config = load_config(path)
    assert config.model.tokenizer_path == tmp_path / "tokenizer.model"
    assert config.notices == ()


@pytest.mark.parametrize(
    ("written", "expected"),
    [("DataType.FLOAT16", "float16"), ("DataType.BFLOAT16", "bfloat16"), ("fp32", "float32"), ("Float16", "float16")],
)
def test_dtype_names_of_other_servers_are_accepted(written, expected):
    assert load_config(None, [f"model_config.model_dtype={written}"]).model.model_dtype == expected


@pytest.mark.parametrize("target", ["CPU", "Ascend"])
@pytest.mark.parametrize(
    ("written", "compute_dtype", "expected"),
    [
        ("DataType.FLOAT32", "float16", "float16"),
        ("DataType.FLOAT32", "bfloat16", "bfloat16"),
        ("DataType.FLOAT32", None, "float16"),
        ("DataType.FLOAT16", "bfloat16", "bfloat16"),
        ("DataType.FLOAT16", None, "float16"),
        ("DataType.BFLOAT16", "bf16", "bfloat16"),
        ("float16", "bfloat16", "float16"),
    ],
)
def test_compute_dtype_takes_precedence_over_model_dtype_of_older_servers(
    tmp_path, target, written, compute_dtype, expected
):
    given = "" if compute_dtype is None else f", compute_dtype: {compute_dtype}"
    text = f"context: {{device_target: {target}}}\nmodel: {{model_config: {{theta: 1e4{given}}}}}\n"
    write_yaml(tmp_path, text, "model.yaml")
    path = write_yaml(tmp_path, f'model_config: {{model_cfg_path: model.yaml, model_dtype: "{written}"}}')
    config = load_config(path)
    assert config.model.model_dtype == expected
    notice = (
        f"model_config.model_dtype: {written} is read as {compute_dtype or 'float16'}: the older servers only printed"
    )
    source = f"{tmp_path}/model.yaml:2" if compute_dtype else "MindFormers' default"
    found = [each for each in config.notices if notice in each and each.endswith(f"({source})")]
    assert len(found) == (written.startswith("DataType.") and written.partition(".")[2].lower() != expected)


@pytest.mark.parametrize(("target", "expected"), [("CPU", "float32"), ("Ascend", "float16")])
def test_an_older_float32_without_a_mindformers_yaml_loads_on_ascend_too(tmp_path, target, expected):
    path = write_yaml(tmp_path, 'model_config: {model_dtype: "DataType.FLOAT32"}')
    config = load_config(path, [f"device_config.device_target={target}"])
    assert config.model.model_dtype == expected
    assert any("DataType.FLOAT32 is read as float16" in each for each in config.notices) == (target == "Ascend")


def test_command_line_dtype_takes_precedence_over_compute_dtype(tmp_path):
    write_yaml(tmp_path, "model: {model_config: {compute_dtype: float16}}\n", "model.yaml")
    path = write_yaml(tmp_path, "model_config: {model_cfg_path: model.yaml}")
    assert load_config(path, ["model_config.model_dtype=DataType.FLOAT32"]).model.model_dtype == "float32"
