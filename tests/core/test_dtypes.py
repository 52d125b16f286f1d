"""Description of quantized weights in a config.json."""

import pytest
from llm_serving.core.dtypes import describe_quantization


@pytest.mark.parametrize(
    ("given", "description"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "GPTQ, 4 bits, groups of 128"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "AWQ, 4 bits, groups of 64"),
        ({"quant_method": "bitsandbytes", "_load_in_8bit": False, "load_in_4bit": True}, "bitsandbytes, 4 bits"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8, 8 bits"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
            "compressed-tensors, 8 bits",
        ),
        ({"quant_method": "newest", "bits": True, "group_size": -1}, "'newest'"),
        ({}, "an unnamed method"),
        ("gptq", "'gptq'"),
        (None, None),
    ],
)
def test_describe_quantization_names_method_bits_and_groups(given, description):
    assert describe_quantization({"quantization_config": given}) == description
