"""The invariant backend uses the products of `ms_custom_ops`, here a fake, and otherwise equals the Ascend backend."""

import sys
from types import ModuleType

import mindspore as ms
import numpy as np
import pytest
from llm_serving.backends import create_backend
from llm_serving.backends.ascend_invariant import has_cann_package
from llm_serving.errors import KernelError

pytestmark = pytest.mark.mindspore


class Product:
    """A fake of `ms_custom_ops.matmul_batch_invariant` that computes with NumPy and stores its arguments."""

    def __init__(self):
        self.shapes = []

    def __call__(self, x, y):
        assert x.dtype == y.dtype
        assert x.shape[1] == y.shape[0]
        self.shapes.append((x.shape, y.shape))
        return ms.Tensor(x.asnumpy() @ y.asnumpy())


def kernels(folder):
    """Make the folder of the CANN package."""
    made = folder / "custom_batchinvariant"
    made.mkdir(parents=True)
    return made


@pytest.fixture
def product(monkeypatch, tmp_path):
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"/nowhere:{kernels(tmp_path)}")
    package = ModuleType("ms_custom_ops")
    package.matmul_batch_invariant = Product()
    monkeypatch.setitem(sys.modules, "ms_custom_ops", package)
    return package.matmul_batch_invariant


def test_invariant_backend_uses_the_package_product(product):
    backend = create_backend("ascend_invariant", "float16")
    x = np.arange(6, dtype=np.float16).reshape(2, 3)
    weight = np.arange(12, dtype=np.float16).reshape(4, 3)
    linear, logits = backend.linear(), backend.logits()
    y, z = (cell.construct(ms.Tensor(x), backend.linear_weight(weight)) for cell in (linear, logits))
    assert product.shapes == [((2, 3), (3, 4))] * 2
    assert backend.linear_weight(weight).shape == (3, 4)
    assert np.array_equal(y.asnumpy(), x @ weight.T)
    assert (y.dtype, z.dtype) == (ms.float16, ms.float32)


def test_a_tied_weight_keeps_its_rows(product):
    backend = create_backend("ascend_invariant", "float16")
    x, table = np.ones((2, 3), np.float16), np.arange(12, dtype=np.float16).reshape(4, 3)
    weight = backend.tied_weight(table)
    assert weight.shape == (4, 3)
    assert np.array_equal(backend.logits().construct(ms.Tensor(x), weight).asnumpy(), x @ table.T)


def test_invariant_backend_names_the_missing_kernels(product, monkeypatch):
    monkeypatch.delenv("ASCEND_CUSTOM_OPP_PATH")
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(KernelError, match="need the CANN package ops-batchinvariant: there is no folder"):
        create_backend("ascend_invariant", "bfloat16")


@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_OPP_PATH"])
def test_kernels_are_found_in_cann(tmp_path, variable):
    home = tmp_path / "opp" if variable == "ASCEND_OPP_PATH" else tmp_path
    assert not has_cann_package({variable: str(home)})
    kernels(tmp_path / "opp" / "vendors")
    assert has_cann_package({variable: str(home)})


@pytest.mark.parametrize(
    ("package", "message"), [(None, "import of ms_custom_ops halted"), (ModuleType("ms_custom_ops"), "no attribute")]
)
def test_invariant_backend_names_the_missing_package(monkeypatch, package, message):
    monkeypatch.setitem(sys.modules, "ms_custom_ops", package)
    with pytest.raises(KernelError, match=f"products need ms_custom_ops.matmul_batch_invariant: .*{message}"):
        create_backend("ascend_invariant", "bfloat16")


@pytest.mark.parametrize("error", ["OSError('libopapi.so: cannot open')", "RuntimeError('no kernels')"])
def test_invariant_backend_names_the_error_of_a_package_that_does_not_load(monkeypatch, tmp_path, error):
    """A package of operators loads shared libraries when it is imported."""
    (tmp_path / "ms_custom_ops.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ms_custom_ops", raising=False)
    with pytest.raises(KernelError, match=r"need ms_custom_ops\.matmul_batch_invariant: .*(cannot open|no kernels)"):
        create_backend("ascend_invariant", "bfloat16")
