import numpy as np
import pytest
from families import models
from llm_serving.config import load_config
from llm_serving.core.enums import QuantizationName
from llm_serving.errors import ConfigError
from llm_serving.models.spec import ModelSpec
from llm_serving.network.builder import Network
from llm_serving.network.experts import Expert, ExpertRouting
from llm_serving.network.operations import Value, Weight
from llm_serving.network.quantization import (
    Quantization,
    unsupported_by_ascend,
    unsupported_by_cells,
    unsupported_quantization,
)
from llm_serving.network.states import causal_conv, delta_rule, ssm

DELTA = "the gated delta rule"


@pytest.mark.parametrize(
    ("name", "primitives", "cells"),
    [
        ("llama3.1", None, None),
        ("mistral", "attention with a window of 64 tokens", None),
        ("gemma2", "attention with a window of 64 tokens", None),
        ("baichuan2-13b", "attention with ALiBi slopes", None),
        ("gpt-oss", "attention with sinks", "attention with sinks"),
        ("cohere", "layer norms", "layer norms"),
        ("qwen3-next", f"causal convolutions and {DELTA}", f"causal convolutions and {DELTA}"),
        ("ernie4.5-moe", "experts chosen by a rule other than their softmax scores", None),
        ("deepseek-v2-lite", "projections with one weight per head", "projections with one weight per head"),
    ],
)
def test_unsupported_operations_of_each_family(tmp_path, name, primitives, cells):
    models.write(name, tmp_path)
    network = ModelSpec.from_folder(tmp_path).network
    assert (unsupported_by_ascend(network, 4096), unsupported_by_cells(network)) == (primitives, cells)
    for kernels, lacks, have in (("primitives", primitives, "program and plain have"), ("plain", cells, "")):
        overrides = [f"device_config.kernels={kernels}", "model_config.model_dtype=bfloat16"]
        if lacks is None:
            load_config(None, overrides, tmp_path)
            continue
        with pytest.raises(ConfigError) as error:
            load_config(None, overrides, tmp_path)
        have = "program has" if cells else have
        rule = f"must name a model without {lacks} with device_config.kernels: {kernels} ({have} it)"
        assert rule in str(error.value)


def attention(**facts):
    net = Network(64, 97)
    q, k, v = net.split(net.linear(net.embedding("table"), "qkv", 192), 64, 64, 64)
    net.attention(q, net.store_kv(k, v, 4), scale=0.25, **facts)
    return net


def experts(**routing):
    net = Network(64, 97)
    names = [Expert(f"{at}.gate", f"{at}.up", f"{at}.down") for at in range(4)]
    net.experts(net.embedding("table"), "router", ExpertRouting(top_k=2, **routing), names, 32)
    return net


def feed_forward(body):
    net = Network(64, 97)
    body(net, net.embedding("table"))
    return net


CHOSEN = "experts chosen by a rule other than their softmax scores"
PARTS = {"rates": "rates", "bias": "bias"}
SLOPES = Weight((), (4,), generate=lambda num_positions: np.zeros(4, np.float32))


@pytest.mark.parametrize(
    ("network", "lacks"),
    [
        (attention(), None),
        (attention(window=64), "attention with a window of 64 tokens"),
        (attention(cap=30.0), "attention with soft-capped scores"),
        (attention(slopes=SLOPES), "attention with ALiBi slopes"),
        (attention(q_rope=Value("turned", 64)), "attention to latent keys"),
        (attention(sinks=Weight(("sinks",), (4,), ((4,),))), "attention with sinks"),
        (feed_forward(lambda net, x: net.layer_norm(x, "norm")), "layer norms"),
        (feed_forward(lambda net, x: net.activation(x, "gelu")), "activation function gelu without a gate"),
        (feed_forward(lambda net, x: net.gated_activation(x, "clamped")), "activation function clamped"),
        (feed_forward(lambda net, x: net.multiply(x, x)), "products of two values"),
        (feed_forward(lambda net, x: causal_conv(net, net.multiply(x, x), "conv", 3)), "causal convolutions"),
        (feed_forward(lambda net, x: delta_rule(net, x, x, x, x, x, key_heads=4, **PARTS, scale=1.0)), DELTA),
        (
            feed_forward(lambda net, x: ssm(net, x, x, x, x, groups=4, **PARTS, skip="skip")),
            "state space models (Mamba-2)",
        ),
        (experts(), None),
        (experts(bias=True), "experts chosen with a bias"),
        (experts(score="sigmoid"), CHOSEN),
        (experts(groups=2), CHOSEN),
        (experts(correction="correction"), CHOSEN),
    ],
)
def test_unsupported_by_ascend_names_each_feature(network, lacks):
    assert unsupported_by_ascend(network, 4096) == lacks


def test_unsupported_by_ascend_ignores_a_window_of_the_whole_context(tmp_path):
    models.write("mistral", tmp_path)
    assert unsupported_by_ascend(ModelSpec.from_folder(tmp_path).network, 64) is None


@pytest.mark.parametrize(
    ("name", "kept", "lacks"),
    [
        ("llama3.1", "w8a8", None),
        ("llama3.1", "w4a16", "products of w4a16 weights"),
        ("qwen3-moe", "w8a8", None),
        ("qwen3-moe", "w4a8", "products of w4a8 weights"),
    ],
)
def test_unsupported_quantization_accepts_w8a8_only(tmp_path, name, kept, lacks):
    models.write(name, tmp_path)
    assert unsupported_quantization(Quantization(QuantizationName(kept))) == lacks
    assert unsupported_quantization(None) is None
    overrides = [f"quant_config.quantization={kept}", "model_config.model_dtype=bfloat16"]
    for kernels in ("primitives", "plain"):
        given = [*overrides, f"device_config.kernels={kernels}"]
        if lacks is None and kernels == "primitives":
            assert load_config(None, given, tmp_path).quant.quantization == kept
            continue
        with pytest.raises(ConfigError, match=r"`quant_config\.quantization` must be .*program on a CPU has"):
            load_config(None, given, tmp_path)
