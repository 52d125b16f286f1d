"""Checks of the device, before a WorkAgent would fail."""

import json

import pytest
from llm_serving.config import load_config
from llm_serving.errors import ConfigError
from llm_serving.models.memory import PROCESS_BYTES, working_bytes
from llm_serving.models.spec import ModelSpec
from support.family_configs import config_of
from support.model_folders import write_config

ASCEND = "device_config.device_target=Ascend"


def error_of(*overrides, model=None):
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides, model)
    return str(caught.value)


@pytest.mark.parametrize("kernels", ["auto", "plugin"])
@pytest.mark.parametrize("block_size", [1, 8, 24, 100])
def test_block_size_must_be_a_multiple_of_16(kernels, block_size):
    message = error_of(f"pa_config.block_size={block_size}", f"device_config.kernels={kernels}")
    assert message == (
        "--set: `pa_config.block_size` must be a multiple of 16 for the operator library; device_config.kernels: plain "
        f"takes any, many times slower. Given: {block_size}"
    )


def test_request_log_on_disk_needs_a_path_and_resumable_streams_need_a_log():
    assert error_of("serving_config.request_log=disk") == (
        "default: `serving_config.request_log_path` must be given with request_log: disk. Given: None"
    )
    message = error_of("serving_config.request_log=none", "serving_config.resume_streams=True")
    assert message.startswith("--set: `serving_config.resume_streams` must be False with request_log: none")


def test_plain_kernels_accept_any_block_and_head_size(tmp_path):
    model = write_config(tmp_path / "model", head_dim=10)
    config = load_config(None, ["pa_config.block_size=5", "device_config.kernels=plain"], model)
    assert config.pa.block_size == 5


def test_heads_are_padded_for_the_operator_library(tmp_path):
    folder = write_config(tmp_path / "model", head_dim=40)
    assert ModelSpec.from_folder(folder).head_dims == {48}
    load_config(None, model=folder)


@pytest.mark.parametrize(
    ("overrides", "head_dim", "message"),
    [
        (
            ["model_config.model_dtype=float32"],
            64,
            "--set: `model_config.model_dtype` must be one of bfloat16, float16 on Ascend. Given: float32",
        ),
        (["pa_config.block_size=8"], 64, "`pa_config.block_size` must be a multiple of 16 on Ascend. Given: 8"),
        ([], 48, "must name a model whose head_dim is a multiple of 32 on Ascend. Given: 48"),
        ([], 512, "must name a model whose head_dim is at most 256 on Ascend. Given: 512"),
        (
            ["pa_config.block_size=256"],
            128,
            "`pa_config.block_size` times the model's head_dim 128 must be at most 16384 on Ascend. Given: 256",
        ),
    ],
)
def test_settings_that_ascend_does_not_support_are_refused(tmp_path, overrides, head_dim, message):
    model = write_config(tmp_path / "model", head_dim=head_dim)
    assert message in error_of(ASCEND, *overrides, model=model)


@pytest.mark.parametrize(("key", "given", "must"), [("enable_graph_kernel", True, False), ("jit_level", "O1", "O0")])
def test_infer_boost_excludes_other_levels(key, given, must):
    message = error_of(ASCEND, f"device_config.{key}={given}")
    assert message == (
        f"--set: `device_config.{key}` must be {must} with device_config.device_target: Ascend (--set): PagedAttention "
        f"requires infer boost, which supports only jit_level O0. Given: {given}"
    )


def test_fusion_in_a_mindformers_file_is_a_notice_on_ascend(tmp_path):
    described = tmp_path / "predict.yaml"
    described.write_text("context: {device_target: Ascend, enable_graph_kernel: True, jit_config: {jit_level: O1}}\n")
    config = load_config(None, [f"model_config.model_cfg_path={described}"])
    assert (config.device.enable_graph_kernel, config.device.jit_level) == (False, "O0")
    assert [notice for notice in config.notices if "infer boost" in notice] == [
        f"{described}:1: {key}: {given} is read as {read}: Ascend serves with infer boost at level O0"
        for key, given, read in (
            ("device_config.enable_graph_kernel", True, False),
            ("device_config.jit_level", "O1", "O0"),
        )
    ]


@pytest.mark.parametrize("fast", ["device_config.exactness=fast", "device_config.prompt_attention=flash"])
def test_exactness_fast_requires_primitive_kernels(fast):
    assert error_of(fast) == (
        "--set: `device_config.exactness` must be exact with device_config.kernels: auto on a CPU: only the "
        "primitives have another attention. Given: fast"
    )
    for served in ([ASCEND], ["device_config.kernels=primitives"]):
        config = load_config(None, [fast, *served])
        assert config.device.exactness == "fast"
        assert config.notices == (
            "--set: device_config.exactness: fast applies to steps of whole prompts only; "
            "scheduler_config.enable_mixed_chunk: False makes more of them",
        )
    assert not load_config(None, [fast, ASCEND, "scheduler_config.enable_mixed_chunk=False"]).notices


def test_ascend_accepts_blocks_of_128(tmp_path):
    model = write_config(tmp_path / "model", head_dim=128)
    assert load_config(None, [ASCEND, "pa_config.block_size=128"], model).pa.block_size == 128


@pytest.mark.parametrize(
    ("overrides", "head_dim", "size"),
    [
        ([], 64, 16),
        ([ASCEND], 128, 32),
        ([ASCEND], 256, 32),
        ([ASCEND, "device_config.exactness=fast"], 128, 128),
        ([ASCEND, "device_config.exactness=fast"], 256, 64),
        ([ASCEND, "pa_config.block_size=16"], 128, 16),
    ],
)
def test_default_block_size_depends_on_device_and_head_size(tmp_path, overrides, head_dim, size):
    model = write_config(tmp_path / "model", head_dim=head_dim)
    assert load_config(None, overrides, model).pa.block_size == size


@pytest.mark.parametrize("key", ["num_blocks", "num_swap_blocks"])
def test_number_of_kv_slots_is_limited(key):
    message = error_of(f"pa_config.{key}=200000000")
    rule = "times pa_config.block_size 16 must be at most 2147483647 tokens. Given: 200000000"
    assert message == f"--set: `pa_config.{key}` {rule}"


def test_vocabulary_size_is_limited(tmp_path):
    message = error_of(model=write_config(tmp_path / "model", vocab_size=2**20 + 1))
    assert "must name a model with a vocabulary of at most 1048576. Given: 1048577" in message


@pytest.mark.parametrize(("kernels", "dtype_bytes"), [("auto", 2), ("plain", 4)])
def test_memory_limit_without_room_for_one_block_is_refused(tmp_path, kernels, dtype_bytes):
    model = write_config(tmp_path / "model")
    spec = ModelSpec.from_folder(model)
    block = 16 * spec.kv_bytes_per_token(dtype_bytes)
    working = working_bytes(spec, dtype_bytes, 512, 128)
    least = PROCESS_BYTES + dtype_bytes * spec.num_parameters + working + block
    overrides = [f"device_config.kernels={kernels}", f"device_config.max_device_memory={least}"]
    assert load_config(None, overrides, model).device.max_device_memory == least
    overrides[1] = f"device_config.max_device_memory={least - 1}"
    message = error_of(*overrides, model=model)
    assert message.startswith(f"--set: `device_config.max_device_memory` must be at least {least} bytes: 600000000 for")
    assert load_config(None, [*overrides, "pa_config.num_blocks=4"], model).pa.num_blocks == 4


@pytest.mark.parametrize("other", [ASCEND, "device_config.kernels=primitives", "device_config.kernels=plain"])
def test_int8_kv_cache_requires_the_program_kernels(other):
    message = error_of("quant_config.kv_cache_dtype=int8", other)
    assert "`quant_config.kv_cache_dtype` must be auto with device_config.device_target: " in message
    assert message.endswith("program on a CPU has it. Given: int8")


def test_int8_kv_cache_is_refused_for_latent_attention(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("deepseek2")))
    message = error_of("quant_config.kv_cache_dtype=int8", model=tmp_path)
    rule = "`quant_config.kv_cache_dtype` must be auto for DeepseekV2ForCausalLM, which has attention to latent keys"
    assert rule in message


def test_int8_kv_cache_needs_less_memory(tmp_path):
    model = write_config(tmp_path / "model")
    spec = ModelSpec.from_folder(model)
    less = 16 * (spec.kv_bytes_per_token(2) - spec.kv_bytes_per_token(2, int8=True))
    assert less > 0
    least = PROCESS_BYTES + 2 * spec.num_parameters + working_bytes(spec, 2, 512, 128) + 16 * spec.kv_bytes_per_token(2)
    limit = f"device_config.max_device_memory={least - less}"
    assert load_config(None, ["quant_config.kv_cache_dtype=int8", limit], model)
    assert f"at least {least} bytes" in error_of(limit, model=model)


@pytest.mark.parametrize(
    ("override", "notice"),
    [
        (
            "model_config.batching_strategy=static",
            "--set: model_config.batching_strategy: static: requests with use_beam_search are refused with 400",
        ),
        (
            "scheduler_config.preemption_mode=swap",
            "--set: scheduler_config.preemption_mode: swap never swaps: pa_config.num_swap_blocks is 0",
        ),
        (
            "pa_config.num_swap_blocks=4",
            "--set: pa_config.num_swap_blocks: 4 blocks are never used: scheduler_config.preemption_mode is recompute",
        ),
    ],
)
def test_device_setting_with_a_surprising_effect_has_a_notice(override, notice):
    assert load_config(None, [override]).notices == (notice,)
