"""The network compared with a float64 implementation that shares no code, and with itself for any split into steps."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.backends.ascend import AscendBackend
from llm_serving.backends.cpu import CpuBackend
from llm_serving.errors import ModelError
from llm_serving.kernels import library
from llm_serving.models import attention
from support.graph_model import GraphModel, backend
from support.kernel_calls import FIXED_POINT_ISA, typed
from support.model_factories import random_weights, tiny_spec, weight_shapes, write_model, write_safetensors
from support.reference_llama import reference_logits

pytestmark = pytest.mark.mindspore

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "grouped queries": {},
    "one key head a query head": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "tied embeddings": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3 scaling": {"rope_theta": 500.0, "rope_scaling": LLAMA3},
    "tied, biases, llama3 scaling": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 500.0,
        "rope_scaling": LLAMA3,
    },
    "linear scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "heads of 32": {"head_dim": 32},
    "heads of 48": {"head_dim": 48, "num_attention_heads": 3, "num_key_value_heads": 1},
    "heads of 64": {"head_dim": 64, "num_attention_heads": 1, "num_key_value_heads": 1},
    "heads of 128": {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    "odd sizes": {"vocab_size": 131, "hidden_size": 80, "intermediate_size": 104, "num_hidden_layers": 1},
}
ONE_LAYER = {"num_hidden_layers": 1}
"""One layer for graphs of Cells, which MindSpore compiles in seconds; tests/families/test_networks.py has several
layers.
"""
PROMPT = np.random.default_rng(5).integers(0, 97, 45).tolist()


@pytest.fixture(scope="module")
def make_model(tmp_path_factory):
    """Return a function (backend name, dtype, changes of the tiny spec) -> network with the weights of
    `random_weights`.
    """
    made = {}

    def make(name, dtype, changes=None):
        changes = changes or {}
        key = (name, dtype, str(changes), library.load().llm_isa())  # packed weights depend on the instruction set
        if key not in made:
            spec = tiny_spec(**changes)
            folder = tmp_path_factory.mktemp("model")
            write_model(folder, spec)
            made[key] = GraphModel(spec, folder, backend(name, dtype))
        return made[key]

    return make


def reference(changes=None, token_ids=PROMPT):
    spec = tiny_spec(**(changes or {}))
    return reference_logits(spec, random_weights(spec), token_ids)


def largest_error(logits, changes=None):
    """Return the largest difference from the reference, relative to the largest logit."""
    exact = reference(changes)
    return np.abs(logits - exact).max() / np.abs(exact).max()


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_float32_logits_equal_the_reference(make_model, changes):
    # About 40 roundings of 2^-24 of sums of at most 128 terms: a mean error of 3e-6, at most 2e-5.
    assert largest_error(make_model("cpu", "float32", changes).logits((PROMPT, 0, [4, 9, 2])), changes) < 2e-5


@pytest.mark.parametrize("variant", ["grouped queries", "tied embeddings", "biases", "heads of 48"])
def test_bfloat16_logits_are_near_the_reference(make_model, variant):
    # The residual and its inputs are rounded to 8 bits some 18 times. Errors of at most 2^-9 each add up to sqrt(18) *
    # 2^-9 = 0.8 % of a typical value; the largest error of 4,000 logits is four times that.
    changes = VARIANTS[variant]
    assert largest_error(make_model("cpu", "bfloat16", changes).logits((PROMPT, 0, [4, 9, 2])), changes) < 0.033


def test_float16_logits_are_near_the_reference(make_model):
    # As bfloat16 with three more bits.
    assert largest_error(make_model("cpu", "float16").logits((PROMPT, 0, [4, 9, 2]))) < 0.033 / 8


@pytest.mark.plain
@pytest.mark.parametrize("variant", ["grouped queries", "tied, biases, llama3 scaling"])
def test_plain_backend_logits_equal_the_reference(make_model, variant):
    changes = VARIANTS[variant] | ONE_LAYER
    assert largest_error(make_model("plain", "float32", changes).logits((PROMPT, 0, [4, 9, 2])), changes) < 2e-5


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("grouped queries", "bfloat16"),
        ("grouped queries", "float16"),
        ("biases", "bfloat16"),
        ("heads of 48", "float16"),
        ("odd sizes", "bfloat16"),
        ("odd sizes", "float16"),
    ],
)
def test_library_operators_are_bit_identical_to_the_primitives(make_model, dtype, variant, monkeypatch):
    # The graph of Ascend rounds once more in SwiGLU, by split, SiLU and multiply: tests/backends bounds its error.
    monkeypatch.setattr(AscendBackend, "swiglu", CpuBackend.swiglu)
    # Only a program adds the bias of keys in the rotary embedding and subtracts an offset. Here it must not, so that
    # both models round keys alike.
    monkeypatch.setattr(attention, "_key_offset", lambda *_: None)
    steps = [[(PROMPT[:30], 0, [4, 9]), (PROMPT[:1], 0, [7])], [(PROMPT[30:], 30, [4, 9, 2]), (PROMPT[1:2], 1, [7])]]
    # Unpacked weights, as on Ascend, are multiplied in floating point with every instruction set.
    isa = next(isa for isa in library.supported_isas() if isa != FIXED_POINT_ISA)
    with library.use_isa(isa):
        changes = VARIANTS[variant] | ONE_LAYER
        models = [make_model(name, dtype, changes) for name in ("cpu", "ascend")]
        for rows in steps:
            logits, of_primitives = (model.logits(*rows) for model in models)
            # Ascend's LM head rounds to the model dtype.
            assert np.array_equal(typed(logits, dtype).values, of_primitives)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("cuts", [range(1, 45), [1], [44], [16, 32], [15, 17, 40], [7, 8, 9, 10, 33]])
def test_chunked_prefill_is_bit_identical(make_model, dtype, cuts):
    model = make_model("cpu", dtype)
    whole = model.logits((PROMPT, 0, [4, 9, 2]))
    edges = [0, *cuts, len(PROMPT)]
    blocks = [20, 3, 11]
    chunks = [model.logits((PROMPT[start:end], start, blocks)) for start, end in itertools.pairwise(edges)]
    assert np.concatenate(chunks).tobytes() == whole.tobytes()


@pytest.mark.plain
def test_chunked_prefill_on_the_plain_backend_is_near_the_whole_prompt(make_model):
    model = make_model("plain", "float32", ONE_LAYER)
    whole = model.logits((PROMPT, 0, [4, 9, 2]))
    chunks = [model.logits((PROMPT[start : start + 15], start, [5, 3, 11])) for start in (0, 15, 30)]
    np.testing.assert_allclose(np.concatenate(chunks), whole, rtol=0, atol=2e-5 * np.abs(whole).max())


@settings(max_examples=25)
@given(st.data())
def test_logits_are_batch_invariant(make_model, data):
    """Prompts, chunks and decode rows of several requests in one step, blocks anywhere."""
    model = make_model("cpu", "bfloat16")
    num_rows = data.draw(st.integers(1, 7))
    free = data.draw(st.permutations(range(32)))
    rows, contexts = [], []
    for index in range(num_rows):
        length = data.draw(st.integers(1, 45))
        computed = data.draw(st.integers(0, length - 1))
        blocks = free[index * 3 : index * 3 + 3]
        if computed:
            model.logits((PROMPT[:computed], 0, blocks))
        rows.append((PROMPT[computed:length], computed, blocks))
        contexts.append((computed, length))
    together = model.logits(*rows)
    whole = model.logits((PROMPT, 0, [29, 30, 31]))
    expected = np.concatenate([whole[computed:length] for computed, length in contexts])
    assert together.tobytes() == expected.tobytes()


def test_lm_head_computes_sampled_rows_only(make_model):
    model = make_model("cpu", "bfloat16")
    rows = [(PROMPT[:9], 0, [1]), (PROMPT[:4], 0, [2]), (PROMPT[:20], 0, [3, 4])]
    every = model.logits(*rows)
    some = model.logits(*rows, samples=[0, 2])
    assert some.dtype == np.float32
    assert some.tobytes() == every[[8, 32]].tobytes()


@pytest.mark.parametrize("name", ["cpu", "plain"])
def test_graph_is_compiled_once_for_all_batches(make_model, name):
    model = make_model(name, "float32", ONE_LAYER)
    for rows in (
        [(PROMPT[:1], 0, [1])],
        [(PROMPT, 0, [1, 2, 3])],
        [(PROMPT[:7], 0, [1]), (PROMPT[:30], 0, [2, 3]), (PROMPT[:1], 0, [4])],
        [(PROMPT[:1], 0, [block]) for block in range(9)],
        [(PROMPT[:2], 0, list(range(10)))],
    ):
        for samples in (None, [0]):
            model.logits(*rows, samples=samples)
    assert model.num_compilations == 1


def test_tied_lm_head_may_be_stored(tmp_path):
    spec = tiny_spec(tie_word_embeddings=True)
    weights = write_model(tmp_path, spec)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    write_safetensors(tmp_path / "model.safetensors", weights)
    logits = GraphModel(spec, tmp_path, backend("cpu", "float32")).logits((PROMPT, 0, [4, 9, 2]))
    assert largest_error(logits, {"tie_word_embeddings": True}) < 2e-5


def load(folder, spec, weights):
    write_safetensors(folder / "model.safetensors", weights)
    return GraphModel(spec, folder, backend("cpu", "float32"))


@pytest.mark.parametrize("name", list(weight_shapes(tiny_spec(num_hidden_layers=1))))
def test_missing_tensor_is_refused(tmp_path, name):
    spec = tiny_spec(num_hidden_layers=1)
    weights = random_weights(spec)
    shape = list(weights.pop(name).shape)
    with pytest.raises(ModelError) as error:
        load(tmp_path, spec, weights)
    assert str(error.value).endswith(f"tensor {name} of shape {shape} is missing")


def test_folder_with_undeclared_biases_is_refused(tmp_path):
    spec = tiny_spec(num_hidden_layers=1)
    unread = r"does not have these stored tensors: model\.layers\.0\.mlp\.down_proj\.bias, .* and 4 more"
    with pytest.raises(ModelError, match=unread):
        load(tmp_path, spec, random_weights(tiny_spec(num_hidden_layers=1, attention_bias=True, mlp_bias=True)))


def test_folder_with_other_shapes_is_refused(tmp_path):
    with pytest.raises(
        ModelError, match=r"k_proj\.weight must have shape \[64, 64\] by config.json\. Found: \[32, 64\]"
    ):
        load(tmp_path, tiny_spec(num_key_value_heads=4), random_weights(tiny_spec()))
