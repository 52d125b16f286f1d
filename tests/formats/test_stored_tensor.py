import numpy as np
import pytest
from llm_serving.formats.stored_tensor import is_finite
from support.model_factories import from_bfloat16


@pytest.mark.parametrize("dtype", [np.uint16, np.float16])
def test_is_finite_classifies_every_value(dtype):
    words = np.arange(2**16, dtype=np.uint16)
    values = from_bfloat16(words) if dtype == np.uint16 else words.view(np.float16)
    finite = np.isfinite(values)
    assert is_finite(words[finite].view(dtype))
    assert [is_finite(words[at : at + 1].view(dtype)) for at in range(0, 2**16, 37)] == finite[::37].tolist()


@pytest.mark.parametrize("size", [0, 1, 2**18, 2**18 + 1])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_is_finite_finds_one_element_anywhere(size, value):
    array = np.full(size, -3.4e38, np.float32)
    assert is_finite(array)
    if size:
        array[-1] = value
        assert not is_finite(array)
