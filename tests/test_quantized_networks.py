"""The shipped model with quantized weights and KV caches: right answers, independent of the batch."""

from pathlib import Path

import pytest
from llm_serving.config import load_config
from llm_serving.core.enums import QuantizationName
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.offline import LLM

pytestmark = pytest.mark.mindspore

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, logprobs=3)
SAMPLED = SamplingParams(temperature=1.1, top_p=0.9, seed=7, max_tokens=30, logprobs=2, ignore_eos=True)
PROMPTS = ["Add 17 and 25.", "Count from 1 to 30.", "Sort these words alphabetically: sail rocket beach. " * 8]
REQUESTS = [(prompt, sampling) for prompt in PROMPTS for sampling in (GREEDY, SAMPLED)]
LOADS = {
    "together, by one thread": ("device_config.num_threads=1",),
    "in chunks, preempted": (
        "scheduler_config.max_prefill_tokens=40",
        "pa_config.num_blocks=14",
        "model_config.decode_batch_size=8",
    ),
    "swapped out and in": (
        "scheduler_config.max_prefill_tokens=64",
        "scheduler_config.preemption_mode=swap",
        "pa_config.num_blocks=14",
        "pa_config.num_swap_blocks=40",
        "model_config.decode_batch_size=6",
    ),
}
CODED_CACHE = "keys and values"


def llm(kept: str, *overrides: str) -> LLM:
    key = "kv_cache_dtype=int8" if kept == CODED_CACHE else f"quantization={kept}"
    settings = f"quant_config.{key}", "quant_config.group_size=64", "pa_config.num_blocks=256"
    return LLM(load_config(None, [*settings, *overrides], Path("demo")))


def answers(model: LLM, requests: list[tuple[str, SamplingParams]]) -> list[object]:
    prompts, samplings = zip(*requests, strict=True)
    outputs = model.generate(list(prompts), list(samplings))
    return [(output.text, output.token_ids, output.logprobs) for output in outputs]


@pytest.fixture(scope="module", params=[*QuantizationName, CODED_CACHE])
def kept(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kept: str) -> LLM:
    return llm(kept)


@pytest.fixture(scope="module")
def reference(model: LLM) -> list[object]:
    return [answers(model, [each])[0] for each in REQUESTS]


def test_quantized_models_answer_correctly(model: LLM) -> None:
    asked = ["Add 17 and 25.", "How much is 47 minus 37?", "Sort these words alphabetically: sail rocket beach."]
    outputs = model.generate(asked, GREEDY)
    assert [output.text.strip() for output in outputs] == ["42", "10", "beach rocket sail"]


@pytest.mark.parametrize("load", LOADS)
def test_quantized_models_are_batch_invariant(reference: list[object], kept: str, load: str) -> None:
    assert answers(llm(kept, *LOADS[load]), REQUESTS) == reference


def test_quantized_weights_read_the_expected_bytes(model: LLM, kept: str) -> None:
    """Bytes of all products of a step: the model's weights without the token embedding."""
    from llm_serving.kernels import library

    before = library.load().llm_num_weight_bytes()
    model.generate(["Add"], SamplingParams(temperature=0.0, max_tokens=1))
    spec = model.model_spec
    elements = spec.num_active_parameters + spec.vocab_size * spec.network.hidden
    read = library.load().llm_num_weight_bytes() - before
    in_4_bits = spec.num_active_parameters // 2 + spec.vocab_size * spec.network.hidden
    expected = dict.fromkeys(("w4a16", "w4a8"), in_4_bits)
    expected |= dict.fromkeys(("dequantized", "blocks_a16", CODED_CACHE), 2 * elements)  # the model has no GGUF blocks
    assert read == expected.get(kept, elements)
