"""The shipped model by everything that computes a network on a CPU: the same tokens, and wrong ones by a wrong mask."""

from pathlib import Path

import numpy as np
import pytest
from llm_serving.backends import ascend
from llm_serving.config import load_config
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.kernels import library
from llm_serving.offline import LLM

pytestmark = pytest.mark.mindspore

PROMPTS = ["Add 17 and 25.", "Count from 1 to 9.", "Sort these words alphabetically: sail rocket beach. " * 4]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2)
NETWORKS = {
    "program": (),
    "primitives": ("device_config.kernels=primitives",),
    "primitives, fast": ("device_config.kernels=primitives", "device_config.exactness=fast"),
    "plain": ("device_config.kernels=plain",),
}


def answers(name):
    """Of all prompts at once, in a cache of their own, and the operators that were called."""
    settings = ("pa_config.num_blocks=64", "scheduler_config.max_prefill_tokens=96", "model_config.decode_batch_size=8")
    model = LLM(load_config(None, [*settings, *NETWORKS[name]], Path("demo")))
    with library.profiling():
        outputs = model.generate(PROMPTS, GREEDY)
    return outputs, {time.name for time in library.operator_times() if time.calls}


@pytest.fixture(scope="module")
def of_program():
    return answers("program")[0]


def tokens(outputs):
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "program"])
def test_every_network_answers_alike(of_program, name):
    outputs, called = answers(name)
    assert outputs[0].text.strip() == "42"
    assert tokens(outputs) == tokens(of_program)
    assert ("PagedAttention" in called) == (name != "plain")
    assert ("FlashAttentionScore" in called) == ("fast" in name)
    if name == "plain":  # where the library is loaded, it answers MindSpore's own operators too
        assert called >= {"Add", "Cast", "Gather", "MatMul", "Mul", "Reshape", "Sigmoid", "SplitWithSize"}
    else:  # the same kernels in the same order; MindSpore's own casts cost more than a step of this model
        assert called >= {"Cast", "Greater", "StridedSlice"}
        assert [output.logprobs for output in outputs] == [output.logprobs for output in of_program]


def test_a_wrong_mask_of_paged_attention_gives_wrong_tokens(of_program, monkeypatch):
    monkeypatch.setattr(ascend, "_MASKED", 0.0)
    assert tokens(answers("primitives")[0]) != tokens(of_program)


def test_a_wrong_mask_of_whole_prompts_gives_wrong_tokens(of_program, monkeypatch):
    monkeypatch.setattr(ascend, "prompt_mask", lambda dtype: ascend.ms.Tensor(np.zeros((128, 128))).astype(dtype))
    assert tokens(answers("primitives, fast")[0]) != tokens(of_program)
