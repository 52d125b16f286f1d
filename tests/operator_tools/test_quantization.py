"""`llm-serving quantize`: the output holds the quantized values, and is complete or absent."""

import errno
import json
import os
import re
import signal

import numpy as np
import pytest
from llm_serving.cli.main import main
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.models.weight_reader import WeightReader, check_folder
from llm_serving_tools import writer
from llm_serving_tools.commands import quantize
from llm_serving_tools.quantized_parts import quantize_w4, quantize_w8
from support.model_factories import TINY, tiny_spec, write_model
from support.quantized_folders import LAYOUTS, is_quantized, write_quantized


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "source")


def write_source(folder, **changes):
    spec = tiny_spec(**changes)
    write_model(folder, spec)
    (folder / "config.json").write_text(json.dumps(spec.config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    return folder


def run(source, target, *arguments):
    return main(["quantize", str(source), str(target), *arguments])


FORMATS = {
    "w8a8": (["--format", "w8a8"], quantize_w8, 8),
    "w8a16": (["--format", "w8a16"], quantize_w8, None),
    "w4a16": (["--format", "w4a16", "--group-size", "32"], lambda weight: quantize_w4(weight, 32), None),
    "w4a8": (["--format", "w4a8", "--group-size", "32"], lambda weight: quantize_w4(weight, 32), 8),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("max_shard_bytes", [2**30, 20_000])
def test_quantize_writes_what_the_reader_returns(source, tmp_path, monkeypatch, capsys, name, max_shard_bytes):
    arguments, rounded, activation_bits = FORMATS[name]
    monkeypatch.setattr(writer.write_safetensors, "__defaults__", (max_shard_bytes,))
    assert run(source, tmp_path / "out", *arguments) == 0
    assert "100%" in capsys.readouterr().err
    spec = check_folder(tmp_path / "out")
    assert spec.scheme.activation_bits == activation_bits
    before, after = WeightReader(source), WeightReader(tmp_path / "out", spec.scheme)
    for tensor, shape in spec.tensors.items():
        found, stored = after.read_packed(tensor, shape), before.read(tensor, shape)
        if is_quantized(tensor):
            expected = rounded(stored)
            assert isinstance(found, QuantizedTensor)
            assert np.array_equal(found.qvalues, expected.qvalues)
            assert np.array_equal(found.scales, expected.scales)
            assert (found.bits, found.group_size) == (expected.bits, expected.group_size)
        else:
            assert found.dtype == stored.dtype
            assert np.array_equal(found, stored)
    after.check_all_read()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json"} <= names
    assert "modeling_tiny.py" not in names
    assert (len(names) > 4) == (max_shard_bytes < 2**30)


def test_quantize_ignores_router_weights(tmp_path):
    source = write_source(
        tmp_path / "source",
        architectures=["MixtralForCausalLM"],
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    assert run(source, tmp_path / "out", "--format", "w8a8") == 0
    spec = check_folder(tmp_path / "out")
    reader = WeightReader(tmp_path / "out", spec.scheme)
    kinds = {name: type(reader.read_packed(name, shape)) for name, shape in spec.tensors.items()}
    expert, router = (
        "model.layers.1.block_sparse_moe.experts.3.w2.weight",
        "model.layers.1.block_sparse_moe.gate.weight",
    )
    assert kinds[expert] is QuantizedTensor
    assert kinds[router] is not QuantizedTensor
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ignored = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(2)]
    assert config["quantization_config"]["ignore"] == ["lm_head", *ignored]


def test_quantize_ignores_shared_expert_gates(tmp_path):
    source = write_source(
        tmp_path / "source",
        architectures=["Qwen2MoeForCausalLM"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[0],
    )
    assert run(source, tmp_path / "out", "--format", "w4a16", "--group-size", "32") == 0
    spec = check_folder(tmp_path / "out")
    reader = WeightReader(tmp_path / "out", spec.scheme)
    gate, up = (f"model.layers.1.mlp.shared_expert{each}.weight" for each in ("_gate", ".up_proj"))
    assert not isinstance(reader.read_packed(gate, (1, 64)), QuantizedTensor)
    assert isinstance(reader.read_packed(up, (32, 64)), QuantizedTensor)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    assert sorted(ignored) == ["lm_head", "model.layers.1.mlp.gate", "model.layers.1.mlp.shared_expert_gate"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "w4a16"], r"must divide the columns of every weight: .* has 64. Given: 128"),
        (["--format", "w4a16", "--group-size", "64"], r"down_proj\.weight has 96. Given: 64"),
        (["--format", "w4a16", "--group-size", "0"], "Given: 0"),
        (["--format", "w8a8", "--group-size", "32"], "--group-size requires --format w4a16 or w4a8. Given: w8a8"),
    ],
)
def test_quantize_checks_group_size_before_writing(source, tmp_path, capsys, arguments, message):
    before = sorted(tmp_path.iterdir())
    assert run(source, tmp_path / "out", *arguments) == 2
    assert re.search(message, capsys.readouterr().err)
    assert sorted(tmp_path.iterdir()) == before


def test_quantize_refuses_quantized_models_and_existing_targets(tmp_path, source, capsys):
    write_quantized(tmp_path / "gptq", LAYOUTS["GPTQ, 4 bits"], TINY)
    assert run(tmp_path / "gptq", tmp_path / "out", "--format", "w8a8") == 2
    assert "must hold a model that is not quantised. Found: GPTQ, 4 bits" in capsys.readouterr().err
    assert run(source, tmp_path / "gptq", "--format", "w8a8") == 2
    assert "must be a new folder" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_quantize_interruption_leaves_no_files(source, tmp_path, monkeypatch, capsys, number):
    before, handler = sorted(tmp_path.iterdir()), signal.getsignal(number)

    def end(*args):
        os.kill(os.getpid(), number)
        raise AssertionError("it went on")

    monkeypatch.setattr(quantize, "quantize_w8", end)
    assert run(source, tmp_path / "out", "--format", "w8a8") == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert sorted(tmp_path.iterdir()) == before
    assert signal.getsignal(number) is handler


def test_quantize_respects_ignored_signals(source, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(source, tmp_path / "out", "--format", "w8a8") == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_quantize_on_a_full_disk_leaves_no_files(source, tmp_path, monkeypatch, capsys):
    before = sorted(tmp_path.iterdir())

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as writing to an open file does: without its name

    monkeypatch.setattr(writer, "_write_array", full)
    assert run(source, tmp_path / "out", "--format", "w8a8") == 2
    assert re.search(r"error: \S+/out was not written: \S+: No space left on device\n$", capsys.readouterr().err)
    assert sorted(tmp_path.iterdir()) == before


def test_quantize_to_a_read_only_folder_is_refused(source, tmp_path, monkeypatch, capsys):
    def refused(folder, *args, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr("pathlib.Path.mkdir", refused)
    assert run(source, tmp_path / "out", "--format", "w8a8") == 2
    assert re.search(r"out was not written: \S+/\.out\.\d+: Permission denied\n$", capsys.readouterr().err)
