"""Guarantees about answers for every backend and exactness."""

import pytest
from llm_serving.backends import BACKENDS
from llm_serving.core.enums import ExactnessName
from llm_serving.worker.exactness import GUARANTEES, guarantee

pytestmark = pytest.mark.mindspore

REFUSED = {
    (ExactnessName.FAST, "plain"),
    (ExactnessName.FAST, "ascend"),
    (ExactnessName.FAST, "ascend_invariant"),
    (ExactnessName.EXACT, "ascend_fast"),
}
"""Impossible combinations: `config check` refuses the first, and `backend_for` creates the others for one exactness
only.
"""


def test_every_backend_has_a_guarantee():
    assert set(GUARANTEES) == {(each, name) for each in ExactnessName for name in BACKENDS} - REFUSED


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
def test_bit_identity_is_guaranteed_on_a_cpu(exactness, backend, same_bytes):
    assert guarantee(exactness, backend).startswith("the same request gets the same bytes") == same_bytes


@pytest.mark.parametrize("backend", ["ascend", "ascend_invariant"])
def test_the_guarantee_on_ascend_excludes_attention(backend):
    assert "chooses the split by the shape of the whole batch" in guarantee("exact", backend)


def test_the_guarantee_for_experts_on_ascend_excludes_their_products():
    assert guarantee("exact", "ascend_invariant", has_experts=True).startswith("the same bytes are not promised")
    assert guarantee("exact", "cpu", has_experts=True) == guarantee("exact", "cpu")
