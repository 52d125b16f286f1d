"""The arguments of CANN's operators keep CANN's rules, and a wrong argument is found."""

import pytest
from ascend.arguments import ALL_RULES, RULES, ArgumentError, check
from ascend.kernels import PARTS, read_table
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
    "FlashAttentionScore 0 0 0 0 0 0 bfloat16[128,128] 0 0 0 8 1 0.176777 2147483647 2147483647 0 5 0",
    "atbFlashAttention 1 8 4 32 32 1 128 1 3 requests(2,2,0,0;1,1,512,256;0,0,768,384)",
    "aclnnAdd float32[8,2048] float32[] scalar:int64 float32[8,2048]",
    "aclnnSub int64[8,1] int64[8,1] scalar:int64 int64[8,1]",
    *(f"aclnn{name} float32[8,16] float32[8,1] float32[8,16]" for name in ("Mul", "Div", "Maximum", "Minimum")),
    "aclnnFloorDivide int64[8,1] int64[] int64[8,1]",
    *(f"aclnn{name}Tensor int64[8,1] int64[1,52] bool[8,52]" for name in ("Eq", "Ge", "Gt", "Le", "Lt")),
    "aclnnMuls float32[8,1] scalar:float32 float32[8,1]",
    "aclnnExp float32[8,2048] float32[8,2048]",
    "aclnnFloor float32[8,16] float32[8,16]",
    "aclnnCast float32[8,128] 3 int32[8,128]",
    "aclnnSWhere bool[8,52] float32[1,52] float32[] float32[8,52]",
    "aclnnAmax float32[8,52] ints(-1) 1 float32[8,1]",
    "aclnnReduceSum bool[8,128] ints(-1) 1 0 float32[8,1]",
    "aclnnMaxDim float32[8,97] -1 1 float32[8,1] int64[8,1]",
    "aclnnCumsum int32[8,16] -1 3 int32[8,16]",
    "aclnnTopk float32[8,2048] 128 -1 1 1 float32[8,128] int64[8,128]",
    "aclnnGather float32[8,16] 1 int64[8,1] float32[8,1]",
    "aclnnSlice int32[4,22] 1 19 22 1 int32[4,3]",
    "aclnnSplitWithSize int64[8,16] ints(15,1) 1 list(int64[8,15];int64[8,1])",
    "aclnnCat list(int32[8,1];int32[8,15]) -1 int32[8,16]",
    "aclnnRmsNorm float16[3,256] float16[256] float16[3,256] float32[3,1]",
    "aclnnInplaceZero float16[256,16,4,32]",
    *(f"aclnn{name} float32[16,8] float32[16,8]" for name in ("Cos", "NanToNum", "Reciprocal", "Sigmoid", "Sin")),
    "aclnnAdds float32[16,1] scalar:float64 scalar:int64 float32[16,1]",
    "aclnnDivs float32[16] scalar:int64 float32[16]",
    "aclnnIndexSelect int32[1,5] 0 int32[1] int32[1,5]",
    "aclnnInplaceCopy float16[16,2] float32[1,2]",
    "aclnnInplaceMaskedFillTensor float16[16,2] bool[1,2] float16[]",
    "aclnnMatmul float16[2,3,16] float16[2,16,512] float16[2,3,512] 0",
    "aclnnPermute float16[4,2,16] ints(1,0,2) float16[2,4,16]",
    "aclnnPowTensorTensor float32[] float32[16] float32[16]",
)
"""A call of each operator, as MindSpore makes it."""


@pytest.mark.parametrize("name", [name for name, process in PROCESSES.items() if process.in_table])
def test_operator_calls_satisfy_the_rules_of_cann(ended, name):
    for job in ended(name).jobs.values():
        for call in set(job.calls):
            check(call)
            assert not call.endswith("without an executor")


def test_every_called_operator_has_a_rule(ended):
    """So each function of CANN in the table has one, and FlashAttentionScore, whose kernel is ATB's."""
    processes = [ended(name) for name, process in PROCESSES.items() if process.in_table]
    called = {call.split()[0] for each in processes for job in each.jobs.values() for call in job.calls}
    assert called - {"aclop"} == set(RULES)
    kernels = {kernel for row in read_table().values() for part in PARTS for kernel in row[part].values()}
    assert {kernel for kernel in kernels if kernel.startswith("aclnn")} <= set(RULES)


def test_a_wrong_mask_of_prompts_is_found(ended):
    """ATB accepts a mask of 64 x 64 for prompts of up to 64 tokens, so a process with it starts."""
    calls = {call.split()[0]: call for call in ended("small mask").jobs["demo"].calls}
    for name, rule in (("FlashAttentionScore", "mask must be 128 x 128"), ("atbFlashAttention", "a triangle of 128")):
        with pytest.raises(ArgumentError, match=rule):
            check(calls[name])


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.split()[0])
def test_argument_check_accepts_valid_calls(call):
    check(call)


def test_argument_check_has_a_valid_call_for_each_rule():
    assert {call.split()[0] for call in CALLS} == set(ALL_RULES)


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
        ("bfloat16[128,128]", "bfloat16[64,64]", "mask must be 128 x 128"),
        ("bfloat16[128,128]", "float32[128,128]", "mask must be float16 or bfloat16"),
        ("2147483647 0 5 0", "2147483647 0 4 0", "rows must be"),
        ("2147483647 0 5 0", "2147483647 0 5 2", "in the default modes"),
        ("0 0 0 0 0 0 bfloat16", "0 0 0 float16[1,8,1,1] 0 0 bfloat16", "only a mask may be given"),
        ("8 1 0.176777", "8 0.9 0.176777", "nothing may be dropped"),
        ("atbFlashAttention 1 8 4", "atbFlashAttention 1 8 3", "multiple of key heads"),
        ("1 128 1 3", "1 128 0 3", "triangle"),
        ("1 128 1 3", "1 256 1 3", "triangle"),
        ("4 32 32", "4 288 288", "at most 256"),
        ("2,2,0,0;1,1,512,256", "2,2,0,0;3,3,512,256", "not be cumulative"),
        ("2,2,0,0;1,1,512,256", "1,2,0,0;1,1,256,256", "prompt must be whole"),
        ("1,1,512,256", "1,1,512,0", "begin behind the last one"),
        ("float32[8,2048] float32[] scalar:int64", "float32[8,2048] float16[] scalar:int64", "the same type"),
        ("float32[8,2048] float32[] scalar:int64", "float32[8,2048] float32[] scalar:float32", "int64 scalar"),
        ("Mul float32[8,16] float32[8,1]", "Mul float32[8,16] float32[4,1]", "must broadcast"),
        ("bool[8,52] float32[1,52]", "int8[8,52] float32[1,52]", "condition must be bool"),
        ("GeTensor int64[8,1] int64[1,52] bool", "GeTensor int64[8,1] int64[1,52] int8", "must be bool"),
        ("Div float32[8,16] float32[8,1] f", "Div int64[8,16] int64[8,1] f", "same type, of float16"),
        ("float32[8,128] 3 int32", "float32[8,128] 9 int32", "number must be the result's type"),
        ("MaxDim float32", "MaxDim int32", "take no int32"),
        ("MaxDim float32[8,97] -1", "MaxDim float32[8,97] 2", "dimension must exist"),
        ("int32[8,16] -1 3 int32", "int64[8,16] -1 9 int64", "AICPU"),
        ("float32[8,2048] 128 -1", "float32[8,64] 128 -1", "k must be a number of values"),
        ("128 -1 1 1", "128 -1 1 0", "in order"),
        ("int32[4,22] 1 19 22", "int32[4,22] 1 19 23", "within the tensor"),
        ("ints(15,1)", "ints(14,1)", "add up to the dimension"),
        ("list(int32[8,1];int32[8,15])", "list(int32[8,1];int32[4,15])", "joined dimension only"),
        ("1 int64[8,1] float32[8,1]", "1 int64[16,1] float32[16,1]", "no more rows"),
        ("float16[3,256] float16[256]", "float16[3,256] float16[128]", "a value for each column"),
        ("Muls float32[8,1] scalar:float32", "Muls float32[8,1] scalar:bool", "factor must be a scalar number"),
        ("Muls float32[8,1] scalar:float32 float32", "Muls float32[8,1] scalar:int64 float16", "like the tensor"),
        ("scalar:float64 scalar:int64", "scalar:float64 scalar:float32", "factor of the scalar"),
        ("0 int32[1] int32[1,5]", "0 int32[2] int32[1,5]", "a slice for each index"),
        ("Copy float16[16,2] float32[1,2]", "Copy float16[1,2] float32[16,2]", "broadcast to the target"),
        ("bool[1,2] float16[]", "bool[1,2] float32[]", "of the type of x"),
        ("float16[2,16,512] float16[2,3,512]", "float16[2,8,512] float16[2,3,512]", "inner dimensions"),
        ("ints(1,0,2)", "ints(1,1,2)", "each dimension once"),
        ("Amax float32[8,52] ints(-1) 1 float32[8,1]", "Amax float32[8,52] ints(-1) 0 float32[8,1]", "the maximum"),
    ],
)
def test_argument_check_refuses_a_wrong_argument(right, wrong, rule):
    (call,) = [call for call in CALLS if right in call]
    with pytest.raises(ArgumentError, match=rule):
        check(call.replace(right, wrong))
