"""The tree of errors: statuses and messages that clients see, and their maximum length."""

import pytest
from llm_serving import errors
from llm_serving.errors import CapacityError, ContextLengthError, LLMServingError, RequestError, shorten


def test_request_error_names_field_rule_and_value():
    error = RequestError("top_p", "must be between 0 and 1", 3)
    assert str(error) == "`top_p` must be between 0 and 1. Given: 3"
    assert (error.field, error.rule, error.value, error.http_status) == ("top_p", "must be between 0 and 1", 3, 400)


def test_value_may_be_left_out_and_none_is_a_value():
    assert str(RequestError("prompt", "must not be empty")) == "`prompt` must not be empty"
    assert str(RequestError("n", "must be an integer", None)) == "`n` must be an integer. Given: None"


@pytest.mark.parametrize("value", ["x" * 10**6, ["y" * 10**6] * 10**3, {"k": "v" * 10**6}])
def test_values_in_error_messages_are_short(value):
    assert len(shorten(value)) < 400


def test_error_classes_have_their_http_statuses():
    statuses = {
        name: error.http_status
        for name, error in vars(errors).items()
        if isinstance(error, type) and issubclass(error, LLMServingError) and error.http_status != 500
    }
    assert statuses == {
        "AuthenticationError": 401,
        "RequestError": 400,
        "ContextLengthError": 400,
        "PermissionDeniedError": 403,
        "GoneError": 410,
        "IdempotencyError": 422,
        "RequestNotFoundError": 404,
        "ModelNotFoundError": 404,
        "RequestTooLargeError": 413,
        "RequestTimeoutError": 408,
        "CapacityError": 429,
        "TooLateError": 429,
        "StoreFullError": 429,
        "RateLimitError": 429,
        "RequestCancelledError": 409,
        "TimedOutError": 504,
        "UnavailableError": 503,
    }
    assert issubclass(ContextLengthError, RequestError)


def test_capacity_error_carries_times():
    assert CapacityError("the wait is too long", 2.0, 2500.0).queue_estimate_ms == 2500.0
    assert CapacityError("2000 requests wait").queue_estimate_ms is None
    assert CapacityError("2000 requests wait", 1.5).retry_after == 1.5
    assert CapacityError("2000 requests wait").retry_after is None


def test_every_error_is_in_the_tree_of_the_docstring():
    for name, error in vars(errors).items():
        if isinstance(error, type) and issubclass(error, LLMServingError):
            assert name in (errors.__doc__ or "")


def test_integer_too_long_to_print_is_named_by_its_type():
    assert shorten(10**5000) in ("<int>", shorten(10**5000))
    assert len(shorten(10**5000)) < 60


def test_renamed_error_keeps_its_message():
    for error, text in (
        (RequestError("a", "must be b"), "`c` must be b"),
        (RequestError("a", "must be b", None), "`c` must be b. Given: None"),
        (ContextLengthError("a", "must be b", 3), "`c` must be b. Given: 3"),
    ):
        renamed = error.renamed("c")
        assert (type(renamed), renamed.field, str(renamed)) == (type(error), "c", text)
    assert str(RequestError("a", "must be b", 3).renamed("c", 4)) == "`c` must be b. Given: 4"
