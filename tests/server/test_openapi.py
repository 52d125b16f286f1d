"""Some requests made from the OpenAPI document; many more with `python tests/tools/openapi_cases.py`."""

import pytest
from llm_serving.core.sampling_params import NOT_WITH_A_CONSTRAINT
from llm_serving.server.openapi import LIMITS
from support.fakes import FakeEngine
from support.server_client import post, request
from tools.openapi_cases import DOCUMENT, all_checks, check_answer

CHECKS = dict(all_checks())
EXAMPLES = 8


@pytest.mark.parametrize("check", CHECKS)
def test_routes_match_the_openapi_document(check):
    assert CHECKS[check](EXAMPLES).total() > 0


def test_openapi_document_describes_query_parameters():
    [steps] = DOCUMENT["paths"]["/v1/timeline"]["get"]["parameters"]
    assert (steps["name"], steps["in"], steps["schema"]["minimum"]) == ("steps", "query", 1)


def test_openapi_document_has_parameter_ranges():
    fields = DOCUMENT["components"]["schemas"]["CompletionRequest"]["properties"]
    [temperature] = [branch for branch in fields["temperature"]["anyOf"] if branch["type"] == "number"]
    assert (temperature["minimum"], temperature["maximum"]) == (0.0, 100.0)
    assert fields["best_of"]["description"] == LIMITS["best_of"]
    assert DOCUMENT["components"]["schemas"]["CompletionRequest"]["additionalProperties"] is False


@pytest.mark.parametrize("name", [*NOT_WITH_A_CONSTRAINT, "min_new_tokens"])
def test_openapi_document_describes_structured_output_conflicts(name):
    assert "Not allowed with structured output." in LIMITS[name]


def test_openapi_check_detects_undocumented_refusals():
    answer = post(FakeEngine(), "/v1/completions", {"prompt": "hello", "nonsense": 1})
    with pytest.raises(AssertionError, match="a reason that is not in the document"):
        check_answer(answer, positive=True)
    check_answer(answer, positive=False)
    check_answer(request(FakeEngine(), "GET", "/v1/models"), positive=True)
