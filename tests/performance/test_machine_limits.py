"""The least cost of a step, computed by hand for a small model, and the limits of the machine."""

import pytest
from harness import machine_limits
from harness.machine_limits import (
    Limits,
    LostCores,
    LostCoresMeter,
    StepCost,
    arithmetic_peak,
    decode_seconds,
    prompt_seconds,
)
from llm_serving.models.spec import ModelSpec

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
SPEC = ModelSpec.from_hugging_face(CONFIG)
LAYERS = 2 * (32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 16 + 2 * 32) + 32
HEAD = 100 * 32
COST = StepCost(SPEC, "bfloat16")


def limits(read_bytes_per_s, flop_per_s):
    return Limits("plain", 1, "bfloat16", read_bytes_per_s, flop_per_s, flop_per_s / 2)


def test_step_bytes_are_all_weights_except_the_embedding_and_all_contexts():
    assert COST.num_bytes(0) == 2 * (LAYERS + HEAD)
    assert COST.num_bytes(3) - COST.num_bytes(0) == 3 * 2 * 2 * 16 * 2  # keys and values, two layers


def test_step_bytes_of_an_8_bit_context_include_scales():
    with_int8 = StepCost(SPEC, "bfloat16", int8_kv_cache=True)
    assert with_int8.num_bytes(3) - COST.num_bytes(0) == 3 * 2 * (16 + 4) * 2


def test_step_bytes_count_a_tied_embedding_once():
    tied = StepCost(ModelSpec.from_hugging_face({**CONFIG, "tie_word_embeddings": True}), "float32")
    assert tied.num_bytes(0) == 4 * (LAYERS + HEAD)


def test_step_flop_multiplies_tokens_with_all_weights_and_samples_with_the_lm_head():
    assert COST.flop(5, 5, 0) == (2 * 5 * (LAYERS + HEAD), 0)
    assert COST.flop(0, 0, 7) == (0, 2 * 2 * 32 * 7 * 2)  # scores and sums of 32 elements, two layers


def test_step_flop_of_the_last_layer_is_keys_and_values_without_a_sample():
    query_out_mlp = 32 * 32 + 32 * 32 + 3 * 32 * 16
    assert COST.flop(5, 3, 0) == (2 * (5 * LAYERS - 2 * query_out_mlp + 3 * HEAD), 0)


def test_step_bytes_of_experts_are_those_of_one_row_or_those_counted():
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    config = {**CONFIG, **experts, "architectures": ["Qwen3MoeForCausalLM"]}
    cost = StepCost(ModelSpec.from_hugging_face(config), "bfloat16")
    # A router, two experts in place of one feed-forward half, and norm weights of queries and keys.
    assert cost.num_bytes(0) == 2 * (LAYERS + HEAD + 2 * (8 * 32 + 3 * 32 * 16 + 2 * 16))
    assert cost.reading(12345).num_bytes(0) == 12345
    assert COST.reading(12345) == COST


def test_machine_limit_is_the_higher_of_two_measurements():
    assert limits(3.0, 5.0).better_of(limits(4.0, 2.0)) == limits(4.0, 5.0)


def test_step_limit_is_the_longer_of_reading_and_computing():
    assert prompt_seconds(limits(10.0, 1e30), COST, 4, 3) == pytest.approx(COST.num_bytes(0) / 10)
    pairs = 4 * (1 + 2 + 3)
    products, attention = COST.flop(12, 4, pairs)
    assert prompt_seconds(limits(1e30, 10.0), COST, 4, 3) == pytest.approx(products / 10 + attention / 5)


def test_decode_limit_includes_a_growing_context():
    seconds = decode_seconds(limits(10.0, 1e30), COST, 2, first=5, last=7)
    assert seconds == pytest.approx((COST.num_bytes(2 * 6) + COST.num_bytes(2 * 7)) / 10)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_arithmetic_peak_is_that_of_the_processor(dtype):
    pytest.importorskip("llm_serving.kernels.library")
    assert 1e8 < arithmetic_peak(dtype) < 1e15


def test_lost_cores_exclude_this_process(monkeypatch):
    readings = iter([(100.0, 10.0, 7.0), (109.0, 14.0, 8.0)])
    monkeypatch.setattr(machine_limits, "_cpu_seconds", lambda: next(readings))
    monkeypatch.setattr(machine_limits.time, "perf_counter", iter([50.0, 60.0]).__next__)
    meter = LostCoresMeter()
    assert meter.read() == LostCores(programs=pytest.approx(0.5), host=pytest.approx(0.1))


def test_lost_cores_can_be_read_on_this_machine():
    lost = LostCoresMeter().read()
    assert lost.programs >= 0 and lost.host >= 0
