"""Which weight files of a folder are read, and how other formats are refused."""

import json
import shlex
import sys
from types import ModuleType

import numpy as np
import pytest
from llm_serving.errors import ModelError
from llm_serving.formats.folder import read_tensors
from safetensors.numpy import save_file
from support.model_factories import write_safetensors

A = {"a": np.zeros((2, 3), np.float32)}


def error_of(source):
    with pytest.raises(ModelError) as caught:
        read_tensors(source)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("pytorch_model.bin", "pytorch_model*.bin"),
        ("pytorch_model-00001-of-00002.bin", "pytorch_model*.bin"),
        ("weights.bin", "*.bin"),
        ("model.pth", "*.pth"),
        ("model.pt", "*.pt"),
    ],
)
def test_unsupported_format_error_contains_the_conversion_command(tmp_path, name, pattern):
    (tmp_path / name).write_bytes(b"x")
    for source in (tmp_path, tmp_path / name):
        error = error_of(source)
        assert f"{name} must be converted to safetensors first, with torch and safetensors: python -c " in error
        assert f'glob("{pattern}")' in error


def test_meta_format_error_contains_its_own_conversion_command(tmp_path):
    (tmp_path / "consolidated.00.pth").write_bytes(b"x")
    command = f"convert_llama_weights_to_hf --input_dir {tmp_path} --output_dir {tmp_path}-safetensors --llama_version "
    for source in (tmp_path, tmp_path / "consolidated.00.pth"):
        assert command in error_of(source)


class Tensor:
    """A fake of torch's tensor with the methods that the command uses."""

    def __init__(self, values):
        self.values = values

    def contiguous(self):
        return Tensor(np.ascontiguousarray(self.values))

    def clone(self):
        return Tensor(self.values.copy())


def test_printed_conversion_command_writes_a_readable_file(tmp_path, monkeypatch):
    folder = tmp_path / 'it\'s a "model" ü'
    folder.mkdir()
    for number in (1, 2):
        (folder / f"pytorch_model-{number}.bin").write_bytes(b"x")
    (folder / "training_args.bin").write_bytes(b"x")
    program = shlex.split(error_of(folder).partition("python -c ")[2])[0]

    def load(file, device, weights_only):
        assert (device, weights_only) == ("cpu", True)
        return {file.stem: Tensor(np.ones((3, 2), np.float32).T)}

    torch, saving = ModuleType("torch"), ModuleType("safetensors.torch")
    torch.load = load
    saving.save_file = lambda tensors, file, metadata: save_file(
        {name: each.values for name, each in tensors.items()}, file, metadata
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "safetensors.torch", saving)
    exec(program, {})
    assert sorted(read_tensors(folder)) == ["pytorch_model-1", "pytorch_model-2"]


def test_weight_files_prefer_the_usual_name(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", A)
    write_safetensors(tmp_path / "consolidated.safetensors", {"layers.0.a": A["a"]})
    assert list(read_tensors(tmp_path)) == ["a"]


def test_weight_files_list_all_missing_files_of_an_index(tmp_path):
    files = {f"t{number}": f"model-{number}.safetensors" for number in range(7)}
    write_safetensors(tmp_path / "model-3.safetensors", A)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert "names files that are missing: 6: model-0.safetensors; model-1.safetensors; " in error_of(tmp_path)


def test_weight_files_prefer_safetensors(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", A)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "old.ckpt").write_bytes(b"x")
    assert list(read_tensors(tmp_path)) == ["a"]
    assert list(read_tensors(tmp_path / "model.safetensors")) == ["a"]


def test_empty_folder_error_has_no_conversion_hint(tmp_path):
    with pytest.raises(ModelError, match=r"holds no \*.safetensors file: its weights have not been downloaded, or "):
        read_tensors(tmp_path)


def test_folder_error_hints_at_a_gguf_file(tmp_path):
    (tmp_path / "model-q4.gguf").write_bytes(b"x")
    with pytest.raises(
        ModelError, match=r"holds no \*.safetensors file; model-q4.gguf is a model by itself: name that"
    ):
        read_tensors(tmp_path)
    with pytest.raises(ModelError, match=r"model-q4.gguf is not a GGUF file"):
        read_tensors(tmp_path / "model-q4.gguf")
