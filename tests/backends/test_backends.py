import errno
import gc
import mmap
import os
import subprocess
import sys
import weakref

import mindspore as ms
import numpy as np
import pytest
from llm_serving.backends import create_backend
from llm_serving.backends.parameters import WeightMemory, parameter_over, to_model_dtype, zeroed_bytes
from llm_serving.core.dtypes import round_to_bfloat16
from llm_serving.errors import ConfigError
from llm_serving.kernels import library
from llm_serving.network.caches import CacheShape
from mindspore import ops

pytestmark = pytest.mark.mindspore


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("gpu", "float32", "`backend` must be one of cpu, ascend, ascend_fast, ascend_invariant, plain. Given: gpu"),
        ("cpu", "int8", "`model_dtype` must be one of bfloat16, float16, float32. Given: int8"),
        ("plain", "int8", "`model_dtype` must be one of bfloat16, float16, float32. Given: int8"),
        ("ascend", "float32", "`model_dtype` on ascend must be one of bfloat16, float16. Given: float32"),
    ],
)
def test_create_backend_names_unknown_backends_and_dtypes(name: str, dtype: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        create_backend(name, dtype)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("block_size", "head_dim", "message"),
    [
        (24, 64, "`block_size` must be a multiple of 16 on cpu. Given: 24"),
        (16, 40, "`head_dim` must be a multiple of 16 on cpu. Given: 40"),
    ],
)
def test_cpu_backend_names_the_required_multiple_of_caches(block_size: int, head_dim: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        create_backend("cpu", "bfloat16").kv_cache(4, block_size, CacheShape(2, head_dim, head_dim))
    assert str(error.value) == message


@pytest.mark.parametrize("name", ["cpu", "ascend", "plain"])
def test_linear_weight_accepts_any_float_type_from_read_only_memory(name: str) -> None:
    backend = create_backend(name, "bfloat16")
    values = np.array([[1.0, -2.5, 1.00390625], [0.0, 3.0e38, 1e-3]], dtype=np.float32)
    expected = backend.table(values).astype(ms.float32).asnumpy()
    for array in (values.astype(np.float64), round_to_bfloat16(values)):
        array.setflags(write=False)
        assert np.array_equal(backend.table(array).astype(ms.float32).asnumpy(), expected)
    assert expected[0].tolist() == [1.0, -2.5, 1.0]


def test_parameters_alias_aligned_memory_and_take_names() -> None:
    backend = create_backend("cpu", "bfloat16")
    weight = backend.linear_weight(np.ones((40, 64), dtype=np.float32), "weight")
    key, value = backend.kv_cache(4, 16, CacheShape(2, 32, 32), "layer.0")
    assert [weight.name, key.name, value.name] == ["weight", "layer.0.key", "layer.0.value"]
    assert all(parameter.data_ptr() % 64 == 0 for parameter in (weight, key, value))
    assert (key.shape, key.dtype) == ((4, 16, 2, 32), ms.bfloat16)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_parameters_have_their_dtype_without_a_warning_from_mindspore(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr("mindspore.log.warning", lambda message, *_: warnings.append(message))
    ones = np.ones(3, np.float32)
    array = ones.astype(np.int8) if dtype == "int8" else to_model_dtype(ones, dtype)
    parameter = parameter_over(array, dtype, "ones")
    assert (parameter.dtype, parameter.shape, warnings) == (getattr(ms, dtype), (3,), [])
    assert np.array_equal(parameter.storage, array)


def test_weights_share_large_memories_and_return_them() -> None:
    """Weights lie at cache lines, do not overlap, are zeroed, and a memory goes with the last of its weights."""
    memory = WeightMemory()
    sizes = (1, 64, 100, 3 * 2**20, WeightMemory.SIZE // 2 - 1, WeightMemory.SIZE // 2, 5)
    weights = [memory.take(size) for size in sizes]
    for number, (weight, size) in enumerate(zip(weights, sizes, strict=True), start=1):
        assert weight.nbytes == size and weight.ctypes.data % 64 == 0 and not weight.any()
        weight[...] = number
    assert all((weight == number).all() for number, weight in enumerate(weights, start=1))

    whole = weakref.ref(weights[0].base)
    del weights, weight
    assert whole() is not None  # the next weight lies behind them
    memory.take(WeightMemory.SIZE // 2 - 1)
    memory.take(WeightMemory.SIZE // 2 - 1)
    assert whole() is None


def test_weight_memory_is_allocated_on_linux_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class SmallPages(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(mmap, "mmap", SmallPages)
    memory = zeroed_bytes(2**22)
    memory[-1] = 1
    assert memory.sum() == 1


def test_released_weight_is_no_longer_packed() -> None:
    backend = create_backend("cpu", "float32")
    identity = np.eye(32, dtype=np.float32)
    weight = backend.linear_weight(identity[::-1].copy())
    memory = weight.storage
    kernels = library.load()
    multiply = ops.MatMul(transpose_b=True)
    x = ms.Tensor(np.arange(32, dtype=np.float32)[None])
    assert np.array_equal(multiply(x, weight).asnumpy()[0], np.arange(32)[::-1])
    del weight
    gc.collect()
    memory[...] = identity
    assert np.array_equal(multiply(x, ms.Tensor.from_numpy(memory)).asnumpy()[0], np.arange(32))
    assert kernels.llm_last_error() is not None


LATE_PLUGIN = """
import mindspore as ms, numpy as np
ms.Tensor(np.ones(2, np.float32)) + 1
from llm_serving.backends import create_backend
from llm_serving.errors import KernelError
try:
    create_backend("cpu", "float32").linear_weight(np.ones((2, 2), np.float32))
except KernelError as error:
    print(error)
"""


def test_cpu_backend_refuses_a_late_registration() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", LATE_PLUGIN], capture_output=True, text=True, env=_environment(), timeout=120
    )
    assert "an operator ran before the operator library was registered" in finished.stdout, finished.stderr


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "MS_OP_PLUGIN_PATH"} | {
        "PYTHONPATH": os.pathsep.join(sys.path)
    }
