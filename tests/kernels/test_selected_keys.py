"""Selection of keys whose scores are equal, infinite or NaN, compared with the NumPy reference."""

import numpy as np
import pytest
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.registry import describe
from support.decoder_calls import Step
from support.family_configs import RandomTensors, config_of
from support.kernel_calls import Array
from support.network_reference import parameters, step_of_prompt
from support.network_reference import run as run_reference
from support.program_calls import BLOCK_SIZE, create_caches, run, runnable_of

LENGTH = 90
TABLE = [4, 9, 0, 7, 2, 5]
CONFIG = config_of("deepseek3.2")


class HeadWeights(RandomTensors):
    """Random tensors, except that all weights of the indexer's heads have one value."""

    def __init__(self, value: float) -> None:
        self._value = value

    def read(self, name: str, shape: tuple[int, ...]) -> Array:
        return np.full(shape, self._value, np.float32) if "weights_proj" in name else super().read(name, shape)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_select_keys_takes_the_first_of_equal_scores(isa: str, value: float) -> None:
    net = describe(CONFIG["architectures"][0], ConfigReader(CONFIG, "config"))
    weights = parameters(net, HeadWeights(value), LENGTH)
    tokens = np.random.default_rng(4).integers(0, 97, LENGTH).tolist()
    with np.errstate(invalid="ignore"):
        expected = run_reference(net.operations, weights, step_of_prompt(tokens, net, every=True))
    given = runnable_of(net, weights, "float32")
    rows = list(range(LENGTH))
    slots = [TABLE[row // BLOCK_SIZE] * BLOCK_SIZE + row % BLOCK_SIZE for row in rows]
    step = Step(tokens, rows, slots, [TABLE], [LENGTH], [LENGTH], rows)
    logits = run(given, step, create_caches(given)).array
    assert np.isfinite(expected).all()
    assert np.abs(logits - expected).max() < 1e-4
