"""Guarantees about answers for every backend and exactness."""

import pytest
from llm_serving.backends import BACKENDS
from llm_serving.cli.main import main
from llm_serving.core.enums import ExactnessName
from llm_serving.errors import ConfigError
from llm_serving.worker.exactness import GUARANTEES, OF_EXPERTS, check_block_size, guarantee
from llm_serving_tools.commands.check_config import guarantees_on_ascend
from support.tables import PROJECT

pytestmark = pytest.mark.mindspore

DOCS = PROJECT / "docs"
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
        ("exact", "ascend_invariant", True),
        ("exact", "ascend", False),
        ("fast", "ascend_fast", False),
    ],
)
def test_bit_identity_is_guaranteed_on_a_cpu(exactness, backend, same_bytes):
    assert guarantee(exactness, backend).startswith("the same request gets the same bytes") == same_bytes


def test_the_guarantee_on_ascend_without_packages_excludes_attention():
    assert "chooses the split by the shape of the whole batch" in guarantee("exact", "ascend")


def test_documents_quote_the_logged_guarantees():
    """The README summarizes them."""
    text = " ".join((DOCS / "explanation" / "ascend.md").read_text().split())
    for name in ("ascend_invariant", "ascend"):
        assert GUARANTEES[ExactnessName.EXACT, name] in text
    assert GUARANTEES[ExactnessName.FAST, "ascend_fast"] in text
    assert OF_EXPERTS in text


@pytest.mark.parametrize("block_size", [16, 32])
def test_block_sizes_with_one_summation_order_are_accepted(block_size):
    check_block_size(120, block_size)


@pytest.mark.parametrize("block_size", [64, 128])
def test_block_sizes_whose_summation_order_depends_on_other_rows_are_refused(block_size):
    check_block_size(0, block_size)
    with pytest.raises(ConfigError, match=f"must be 16 or 32 with .*exact.* on Ascend.*Given: {block_size}"):
        check_block_size(120, block_size)


def test_the_guarantee_for_experts_on_ascend_excludes_their_products():
    assert guarantee("exact", "ascend_invariant", has_experts=True).startswith(
        "bit-identical answers are not guaranteed"
    )
    assert guarantee("exact", "cpu", has_experts=True) == guarantee("exact", "cpu")


@pytest.mark.parametrize(
    ("exactness", "backends"), [("exact", ("ascend_invariant", "ascend")), ("fast", ("ascend_fast",))]
)
def test_config_check_prints_what_a_work_agent_on_ascend_logs(exactness, backends, capsys):
    settings = "device_config.device_target=Ascend", f"device_config.exactness={exactness}"
    assert main(["config", "check", "--model", "demo", *(part for each in settings for part in ("--set", each))]) == 0
    _, found, rest = capsys.readouterr().out.partition(f"# answers with device_config.exactness: {exactness}:\n")
    assert found
    lines = rest.splitlines()
    assert len(lines) == len(backends)
    for line, backend in zip(lines, backends, strict=True):
        assert line.endswith(GUARANTEES[ExactnessName(exactness), backend])


def test_only_the_native_network_may_guarantee_the_same_bytes_on_ascend():
    assert guarantees_on_ascend("exact", is_native=False, has_experts=False) == {"": guarantee("exact", "ascend")}
    found = guarantees_on_ascend("exact", is_native=True, has_experts=True)
    assert list(found.values()) == [OF_EXPERTS, guarantee("exact", "ascend")]
