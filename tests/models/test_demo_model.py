"""The shipped model, read like a user's folder."""

from pathlib import Path

import llm_serving.demo_model
import numpy as np
import pytest
from llm_serving.formats.stored_tensor import to_float32
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader
from support.graph_model import GraphModel, backend
from support.reference_llama import reference_logits

pytestmark = pytest.mark.mindspore

FOLDER = Path(llm_serving.demo_model.__file__).parent
TOKENS = np.random.default_rng(0).integers(4, 2048, 60).tolist()


@pytest.fixture(scope="module")
def exact():
    spec, reader = ModelSpec.from_folder(FOLDER), WeightReader(FOLDER)
    weights = {name: to_float32(reader.read(name, shape)) for name, shape in reader.shapes().items()}
    assert sum(weight.size for weight in weights.values()) == spec.num_parameters
    return reference_logits(spec, weights, TOKENS)


# Five layers have 2.5 times as many roundings as the tiny models, each of the same relative size.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-5), ("bfloat16", 0.05)])
def test_demo_model_logits_equal_the_reference(exact, dtype, tolerance):
    model = GraphModel(ModelSpec.from_folder(FOLDER), FOLDER, backend("cpu", dtype))
    logits = model.logits((TOKENS, 0, [9, 4, 17, 2]))
    assert np.abs(logits - exact).max() < tolerance * np.abs(exact).max()
