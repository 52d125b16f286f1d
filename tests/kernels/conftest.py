from collections.abc import Iterator

import pytest
from llm_serving.errors import KernelError
from llm_serving.kernels import library

EMULATED = "amx_emulated"


def isas() -> list[str]:
    """What this CPU can compute with; nothing without a compiler."""
    try:
        supported = library.supported_isas()
    except KernelError:
        return []
    return [*supported, *([EMULATED] if "avx512" in supported else [])]


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set in turn."""
    with library.isa_in_use(request.param):
        yield request.param
