import pytest
from graph_model import backend
from llm_serving.errors import ConfigError
from llm_serving.worker.kv_tensors import KVTensors, block_bytes, num_blocks_for
from model_factories import tiny_spec

pytestmark = pytest.mark.mindspore

# Two layers, keys and values, two heads of 16: 128 elements a token.
SPEC = tiny_spec()


def test_every_layer_has_keys_and_values_of_every_block():
    tensors = KVTensors.allocate(SPEC, backend("cpu", "bfloat16"), num_blocks=5, block_size=16)
    assert len(tensors.layers) == 2
    for parameter in (parameter for layer in tensors.layers for parameter in layer):
        assert parameter.shape == (5, 16, 2, 16)
        assert not parameter.asnumpy().view("uint16").any()


def test_names_are_unique():
    tensors = KVTensors.allocate(SPEC, backend("cpu", "bfloat16"), num_blocks=1, block_size=16)
    assert len({parameter.name for layer in tensors.layers for parameter in layer}) == 4


@pytest.mark.parametrize(("dtype", "element"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_block_bytes(dtype, element):
    assert block_bytes(SPEC, backend("cpu", dtype), 16) == 16 * 128 * element


def test_the_plain_backend_stores_float32():
    assert block_bytes(SPEC, backend("plain", "bfloat16"), 16) == 16 * 128 * 4


def test_num_blocks_for_rounds_down():
    assert num_blocks_for(3 * 4096 + 4095, SPEC, backend("cpu", "bfloat16"), 16) == 3


def test_no_room_for_one_block_is_an_error():
    with pytest.raises(ConfigError, match=r"one block of 4096 bytes\. Left: 4095 bytes"):
        num_blocks_for(4095, SPEC, backend("cpu", "bfloat16"), 16)
