from collections.abc import Iterator

import pytest
from llm_serving.kernels import library
from support.instruction_sets import isas, isas_of_qvalues


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set in turn."""
    with library.use_isa(request.param):
        yield request.param


@pytest.fixture(params=isas_of_qvalues())
def isa_of_codes(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set with its own products of qvalues."""
    with library.use_isa(request.param):
        yield request.param
