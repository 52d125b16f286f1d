"""The shipped model by every implementation on a CPU: the same tokens, and wrong tokens with a wrong mask."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llm_serving.backends import ascend_cells as cells
from llm_serving.config import load_config
from llm_serving.config.paths import DEMO_FOLDER
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.kernels import library
from llm_serving.offline import LLM
from safetensors import deserialize
from support.model_factories import write_safetensors

pytestmark = pytest.mark.mindspore

PROMPTS = ["Add 17 and 25.", "Count from 1 to 9.", "Sort these words alphabetically: sail rocket beach. " * 4]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2)
ENDLESS = replace(GREEDY, ignore_eos=True)
NETWORKS = {
    "program": (),
    "primitives": ("device_config.kernels=primitives",),
    "primitives, fast": ("device_config.kernels=primitives", "device_config.exactness=fast"),
    "plain": ("device_config.kernels=plain",),
}


def answers(name, folder=Path("demo"), sampling=GREEDY):
    """Return the answers to all prompts as one batch in a new cache, and the operators that were called."""
    settings = ("pa_config.num_blocks=64", "scheduler_config.max_prefill_tokens=96", "model_config.decode_batch_size=8")
    model = LLM(load_config(None, [*settings, *NETWORKS[name]], folder))
    with library.profiling():
        outputs = model.generate(PROMPTS, sampling)
    return outputs, {time.name for time in library.operator_times() if time.calls}


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    """Return a folder of the first two layers, in which masks matter, and which MindSpore compiles in half the time."""
    folder = shutil.copytree(DEMO_FOLDER, tmp_path_factory.mktemp("model") / "two")
    path, weights = folder / "config.json", folder / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2}))
    stored = deserialize(weights.read_bytes())
    kept = [each for each in stored if not re.search(r"\.layers\.[2-9]", each[0])]
    bits = {name: np.frombuffer(each["data"], np.uint16).reshape(each["shape"]) for name, each in kept}
    write_safetensors(weights, bits)
    return folder


@pytest.fixture(scope="module")
def of_two_layers(two_layers):
    return answers("program", two_layers, ENDLESS)[0]


def tokens(outputs):
    return [output.token_ids for output in outputs]


def test_plain_operations_give_the_tokens_of_the_program():
    of_program, _ = answers("program")
    assert of_program[0].text.strip() == "42"
    outputs, called = answers("plain")
    assert tokens(outputs) == tokens(of_program)
    assert not called & {"PagedAttention", "FlashAttentionScore"}
    # Where the library is loaded, it answers MindSpore's own operators too.
    assert called >= {"Add", "Cast", "Gather", "MatMul", "Mul", "Reshape", "Sigmoid", "SplitWithSize"}


def test_primitives_give_the_bits_of_the_program(two_layers, of_two_layers):
    """The whole model by primitives: tests/end_to_end/test_every_configuration.py."""
    outputs, called = answers("primitives", two_layers, ENDLESS)
    assert tokens(outputs) == tokens(of_two_layers)
    # The same kernels in the same order; MindSpore's own casts cost more than a step of this model.
    assert [output.logprobs for output in outputs] == [output.logprobs for output in of_two_layers]
    assert called >= {"PagedAttention", "Cast", "Greater", "StridedSlice"}
    assert "FlashAttentionScore" not in called


def test_prompt_attention_gives_the_bits_of_paged_attention(two_layers, of_two_layers):
    """tests/end_to_end/test_every_configuration.py does this with the whole model."""
    outputs, called = answers("primitives, fast", two_layers, ENDLESS)
    assert called >= {"PagedAttention", "FlashAttentionScore"}
    assert tokens(outputs) == tokens(of_two_layers)
    assert [output.logprobs for output in outputs] == [output.logprobs for output in of_two_layers]


@pytest.mark.parametrize("name", ["primitives", "primitives, fast"])
def test_a_wrong_mask_gives_wrong_tokens(two_layers, of_two_layers, name, monkeypatch):
    """With the right mask the tokens are those of the program: see above."""
    if name == "primitives":
        monkeypatch.setattr(cells, "_MASKED", 0.0)
    else:
        monkeypatch.setattr(cells, "prompt_mask", lambda dtype: cells.ms.Tensor(np.zeros((128, 128))).astype(dtype))
    assert tokens(answers(name, two_layers, ENDLESS)[0]) != tokens(of_two_layers)
