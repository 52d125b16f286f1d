"""MindFormers' own networks: batch invariance, and the tokens of the native network; skipped without MindFormers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import models
from families.exactness import Served, differing
from families.models import Prompt
from families.precision import greedy, served
from llm_serving.config import load_config
from llm_serving.core.enums import ImplementationName
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.kernels import library
from llm_serving.models.spec import ModelSpec
from llm_serving.offline import LLM
from support.graph_model import GraphModel, backend
from support.model_factories import random_weights, tiny_spec, write_safetensors

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None,
        reason="MindFormers is not installed: scripts/install_mindformers.sh",
    ),
]

NATIVE, MINDFORMERS = ImplementationName.NATIVE, ImplementationName.MINDFORMERS
LEGACY = ImplementationName.MINDFORMERS_LEGACY
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = [
    "Add 17 and 25.",
    "Count from 1 to 9.",
    "Sort these words alphabetically: sail rocket beach. " * 4,
]
CHUNKS = ("pa_config.num_blocks=64", "scheduler_config.max_prefill_tokens=48", "model_config.decode_batch_size=8")
LARGEST_DIFFERENCE = {"bfloat16": 0.03, "float16": 0.004}
"""Maximum difference of a logit relative to the largest: MindFormers rounds a gate before multiplying by it."""


@pytest.mark.parametrize(
    ("name", "dtype", "implementation"),
    [
        ("llama3.1", "float16", MINDFORMERS),
        ("qwen3", "bfloat16", MINDFORMERS),
        ("glm4", "bfloat16", MINDFORMERS),
        ("qwen3-moe", "bfloat16", MINDFORMERS),
        ("glm4-moe", "bfloat16", MINDFORMERS),
        ("deepseek-v3-wide", "bfloat16", MINDFORMERS),
        ("llama3.1", "bfloat16", LEGACY),
    ],
)
def test_mindformers_answers_are_batch_invariant(
    tmp_path: Path, name: str, dtype: str, implementation: ImplementationName
) -> None:
    assert not differing(Served(name, tmp_path, implementation, dtype))


@pytest.mark.parametrize("dtype", LARGEST_DIFFERENCE)
@pytest.mark.parametrize(
    ("architecture", "implementation"),
    [
        ("LlamaForCausalLM", MINDFORMERS),
        ("LlamaForCausalLM", LEGACY),
        ("Qwen2ForCausalLM", MINDFORMERS),
        ("Qwen3ForCausalLM", MINDFORMERS),
    ],
)
def test_mindformers_logits_equal_the_native_network_up_to_rounding(
    tmp_path: Path,
    architecture: str,
    implementation: ImplementationName,
    dtype: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tied = architecture == "Qwen3ForCausalLM"
    spec = tiny_spec(architectures=[architecture], tie_word_embeddings=tied, rope_theta=1e6)
    write_safetensors(tmp_path / "model.safetensors", random_weights(spec))
    step = (list(range(40)), 0, [5, 2, 7])
    theirs, native = (
        GraphModel(spec, tmp_path, backend("cpu", dtype), as_program=whose == NATIVE, implementation=whose)
        for whose in (implementation, NATIVE)
    )
    logits, expected = theirs.logits(step), native.logits(step)
    assert np.abs(logits - expected).max() < LARGEST_DIFFERENCE[dtype] * np.abs(expected).max()
    if dtype == "float16":  # with fewer digits more tokens are equally likely
        prompt = Prompt(np.arange(40), *[np.zeros(0)] * 3)
        assert greedy(theirs, prompt, 64)[1] == greedy(native, prompt, 64)[1]
    assert theirs.num_compilations == 1
    assert "Param Origin" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "implementation", "native"),
    [
        ("llama3.1", LEGACY, "primitives"),
        *((name, MINDFORMERS, "primitives") for name in ("llama3.1", "qwen3", "qwen3-moe", "glm4")),
        ("glm4-moe", MINDFORMERS, "program"),  # the primitives do not choose experts by a sigmoid
        ("deepseek-v3-wide", MINDFORMERS, "program"),
    ],
)
def test_mindformers_greedy_tokens_equal_those_of_the_native_network_and_of_the_reference(
    tmp_path: Path, name: str, implementation: ImplementationName, native: str
) -> None:
    tokens = []
    for kernels in (implementation, native):
        model, golden, longest = served(name, tmp_path / kernels, kernels, "float16")
        tokens.append([greedy(model, prompt, longest)[1] for prompt in golden.prompts.values()])
    assert tokens[0] == tokens[1]
    assert tokens[0] == [prompt.generated[: len(tokens[0][0])].tolist() for prompt in golden.prompts.values()]
    assert min(map(len, tokens[0])) > 1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("glm4-moe-groups", {"num_experts_per_tok": 4}),
        ("deepseek-v3-wide", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
        ("deepseek-v3-wide", {"q_lora_rank": None, "rope_scaling": None}),
    ],
)
def test_mindformers_options_give_the_logits_of_the_native_network(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    spec = ModelSpec.from_hugging_face(models.model(name).config | changes)
    write_safetensors(tmp_path / "model.safetensors", random_weights(spec))
    theirs, native = (
        GraphModel(spec, tmp_path, backend("cpu", "float16"), as_program=whose == NATIVE, implementation=whose)
        for whose in (MINDFORMERS, NATIVE)
    )
    step = (list(range(40)), 0, [5, 2, 7])
    logits, expected = theirs.logits(step), native.logits(step)
    near = np.abs(logits - expected).max(axis=1) < LARGEST_DIFFERENCE["float16"] * np.abs(expected).max()
    assert near.mean() > 0.9  # a row to which two experts are nearly equal may get the other one


@pytest.mark.parametrize("dtype", LARGEST_DIFFERENCE)
def test_partial_rotary_heads_give_the_logits_of_the_native_network(tmp_path: Path, dtype: str) -> None:
    logits = []
    for kernels in (MINDFORMERS, "program"):
        model, golden, _ = served("glm4", tmp_path / kernels, kernels, dtype)
        logits.append(model.logits((golden.prompts[200].token_ids.tolist(), 0, list(range(13)))))
    assert np.abs(logits[0] - logits[1]).max() < LARGEST_DIFFERENCE[dtype] * np.abs(logits[1]).max()


@pytest.mark.parametrize("implementation", [MINDFORMERS, LEGACY])
@pytest.mark.parametrize("dtype", LARGEST_DIFFERENCE)
def test_the_shipped_model_gives_the_native_tokens_in_one_graph(dtype: str, implementation: ImplementationName) -> None:
    settings = [*CHUNKS, f"model_config.model_dtype={dtype}"]
    native = LLM(load_config(None, settings, Path("demo"))).generate(PROMPTS, GREEDY)
    model = LLM(load_config(None, [*settings, f"model_config.implementation={implementation}"], Path("demo")))
    with library.profiling():
        outputs = model.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in native]
    called = {time.name for time in library.operator_times() if time.calls}
    assert {"PagedAttention", "SiLU", "Mul", "Add"} <= called and "Swiglu" not in called
