"""The arguments of CANN's operators keep CANN's rules, and a wrong argument is found."""

import pytest
from ascend.arguments import RULES, ArgumentError, check
from ascend.processes import PROCESSES

GROUPED = (
    "aclnnGroupedMatmulV4 list(float16[4,64]) list(float16[5,64,96]) {} int64[5] {} 3 0 1 0 list(float16[4,96]) {}"
)
NONE = "list()"
CALLS = (
    "aclnnDynamicQuant float16[1,256] 0 int8[1,256] float32[1]",
    "aclnnQuantMatmulV4 int8[2,256] int8[512,256] float32[512] 0 float32[2] 0 0 1 float16[2,512]",
    GROUPED.format(" ".join([NONE] * 6), " ".join([NONE] * 3), f"{NONE} {NONE}"),
    "aclnnMoeGatingTopKSoftmax float32[2,5] 0 2 float32[2,2] int32[2,2] int32[2,2]",
    "aclnnMoeInitRoutingV2 float16[2,64] int32[2,2] 0 0 5 0 2 1 float16[4,64] int32[4] int32[5] int32[5]",
    "aclnnMoeInitRoutingQuantV2 bfloat16[2,64] int32[2,2] 0 0 0 0 5 0 2 1 1 int8[4,64] int32[4] int32[5] int32[5] "
    "float32[4]",
    "aclnnMoeTokenUnpermute float32[4,64] int32[4] float32[2,2] 0 ints(1) float32[2,64]",
)
"""A call of each operator, as MindSpore makes it."""


@pytest.mark.parametrize("name", [name for name, process in PROCESSES.items() if process.in_table])
def test_operator_calls_satisfy_the_rules_of_cann(ended, name):
    for job in ended(name).jobs.values():
        for call in set(job.calls):
            check(call)
            assert not call.endswith("without an executor")


def test_every_rule_of_cann_is_exercised(ended):
    called = {
        call.split()[0] for name in ("families", "quantized") for job in ended(name).jobs.values() for call in job.calls
    }
    assert set(RULES) <= called


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.split()[0])
def test_argument_check_accepts_valid_calls(call):
    check(call)


def test_argument_check_has_a_valid_call_for_each_rule():
    assert {call.split()[0] for call in CALLS} == set(RULES)


@pytest.mark.parametrize(
    ("right", "wrong", "rule"),
    [
        ("float32[512] 0", "bfloat16[512] 0", "scales must be float32, or bfloat16 for bfloat16"),
        ("float32[512] 0", "float32[256] 0", "one scale for each column"),
        ("int8[512,256]", "int8[256,512]", "same inner dimension"),
        ("int8[2,256] int8[512,256]", "int8[2,65536] int8[512,65536]", "at most 65535"),
        ("0 float32[2] 0", "0 bfloat16[2] 0", "one float32 scale for each row"),
        ("float16[1,256]", "float32[1,256]", "rows must be float16 or bfloat16"),
        ("int64[5]", "int32[5]", "one int64 count for each expert"),
        ("list(float16[5,64,96])", "list(float16[5,96,64])", "same inner dimension"),
        ("list(float16[4,96])", "list(float32[4,96])", "types must go together"),
        (" 3 0 1 0 ", " 3 0 0 0 ", "split by counts"),
        ("float32[2,5] 0 2 ", "float32[2,5] 0 6 ", "k must be at most"),
        (" float16[2,64] int32[2,2]", " float16[2,64] int64[2,2]", "experts must be int32"),
        ("0 0 5 0 2 1 float16[4,64]", "0 1 5 1 2 1 float16[4,64]", "no row may be dropped"),
        ("1 1 int8[4,64]", "1 0 int8[4,64]", "quantized by their own scales"),
        ("float32[4,64] int32[4]", "float32[4,64] int32[2]", "order must be int32"),
    ],
)
def test_argument_check_refuses_a_wrong_argument(right, wrong, rule):
    (call,) = [call for call in CALLS if right in call]
    with pytest.raises(ArgumentError, match=rule):
        check(call.replace(right, wrong))
