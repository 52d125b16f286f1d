"""Which files of a folder are read, and how other forms are refused."""

import shutil

import numpy as np
import pytest
from llm_serving.errors import ModelError
from llm_serving.formats.folder import read_tensors
from model_factories import write_safetensors

A = {"a": np.zeros((2, 3), np.float32)}


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("pytorch_model.bin", "AutoModelForCausalLM"),
        ("consolidated.00.pth", "transformers.models.llama.convert_llama_weights_to_hf"),
    ],
)
def test_a_form_that_is_not_read_comes_with_the_command_that_converts_it(tmp_path, name, command):
    (tmp_path / name).write_bytes(b"x")
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(ModelError, match=f"{name} must be converted to safetensors first") as caught:
            read_tensors(source)
        assert command in str(caught.value)
        assert f"{tmp_path}-safetensors" in str(caught.value)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_command_is_python_that_compiles(tmp_path):
    folder = tmp_path / "it's a model"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError) as caught:
        read_tensors(folder)
    program = str(caught.value).split('python -c "')[1].rpartition('"')[0]
    compile(program, "command", "exec")


def test_safetensors_win_over_other_forms(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", A)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "old.ckpt").write_bytes(b"x")
    assert list(read_tensors(tmp_path)) == ["a"]
    assert list(read_tensors(tmp_path / "model.safetensors")) == ["a"]


def test_an_empty_folder_has_nothing_to_convert(tmp_path):
    with pytest.raises(ModelError, match=r"holds no \*.safetensors file: its weights have not been downloaded, or "):
        read_tensors(tmp_path)


def test_a_gguf_file_is_named_itself(tmp_path):
    (tmp_path / "model-q4.gguf").write_bytes(b"x")
    with pytest.raises(
        ModelError, match=r"holds no \*.safetensors file; model-q4.gguf is a model by itself: name that"
    ):
        read_tensors(tmp_path)
    with pytest.raises(ModelError, match=r"model-q4.gguf is not a GGUF file"):
        read_tensors(tmp_path / "model-q4.gguf")
