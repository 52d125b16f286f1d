import numpy as np
from llm_serving.kernels import library
from support.kernel_calls import call, empty, scalar, typed


def swiglu() -> None:
    call("Swiglu", typed(np.ones((2, 64)), "float32"), scalar(-1, "int64"), empty((2, 32), "float32"))


def calls_of(name: str) -> int:
    return next((time.calls for time in library.operator_times() if time.name == name), 0)


def test_operator_calls_are_counted_while_profiling_only() -> None:
    with library.profiling():
        swiglu()
        swiglu()
    swiglu()
    assert calls_of("Swiglu") == 2
    assert next(time.seconds for time in library.operator_times() if time.name == "Swiglu") > 0


def test_operator_profile_starts_from_zero() -> None:
    with library.profiling():
        swiglu()
    with library.profiling():
        pass
    assert calls_of("Swiglu") == 0
