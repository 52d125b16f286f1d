from collections.abc import Iterator

import pytest
from instruction_sets import isas
from llm_serving.kernels import library


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set in turn."""
    with library.isa_in_use(request.param):
        yield request.param
