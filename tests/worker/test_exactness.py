"""What is promised of answers, for everything that can compute them."""

import pytest
from llm_serving.backends import BACKENDS
from llm_serving.core.enums import ExactnessName
from llm_serving.worker.exactness import PROMISES, promise

pytestmark = pytest.mark.mindspore

REFUSED = {
    (ExactnessName.FAST, "plain"),
    (ExactnessName.FAST, "ascend"),
    (ExactnessName.FAST, "ascend_invariant"),
    (ExactnessName.EXACT, "ascend_fast"),
}
"""Never asked for: `config check` refuses the first, and `backend_for` makes the others for one exactness alone."""


def test_whatever_computes_has_a_promise():
    assert set(PROMISES) == {(each, name) for each in ExactnessName for name in BACKENDS} - REFUSED


@pytest.mark.parametrize(
    ("exactness", "backend", "same_bytes"),
    [
        ("exact", "cpu", True),
        ("fast", "cpu", True),
        ("exact", "plain", False),
        ("exact", "ascend_invariant", False),
        ("exact", "ascend", False),
        ("fast", "ascend_fast", False),
    ],
)
def test_same_bytes_are_promised_where_products_and_attention_are_always_the_same(exactness, backend, same_bytes):
    assert promise(exactness, backend).startswith("the same request gets the same bytes") == same_bytes


@pytest.mark.parametrize("backend", ["ascend", "ascend_invariant"])
def test_exact_on_ascend_says_that_attention_depends_on_the_batch(backend):
    assert "chooses the split by the shape of the whole batch" in promise("exact", backend)


def test_experts_on_a_device_have_no_batch_invariant_products():
    assert promise("exact", "ascend_invariant", has_experts=True).startswith("the same bytes are not promised")
    assert promise("exact", "cpu", has_experts=True) == promise("exact", "cpu")
