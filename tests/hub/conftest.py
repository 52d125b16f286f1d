"""A fake hub on loopback, empty caches, and no variables of the machine's environment."""

import json

import pytest
from support.hub_server import HubServer, StoredModel, running_hub
from support.small_model import CONFIG, small_weights
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

WEIGHTS = small_weights()


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Make every hub unreachable, and both caches empty folders."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "ms-home"))
    for name in ("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    return tmp_path


@pytest.fixture
def hub(caches, monkeypatch):
    """A hub that has `Tiny/Llama`."""
    with running_hub() as server:
        server.models["Tiny/Llama"] = StoredModel(tiny_files())
        for name in ("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"):
            monkeypatch.setenv(name, server.url)
        yield server


def tiny_files(**changes: object) -> dict[str, bytes]:
    """Return the files of a model: those that a server needs, and others that repositories contain."""
    return {
        "README.md": b"# Tiny",
        "config.json": json.dumps(CONFIG | changes).encode(),
        "generation_config.json": b"{}",
        "modeling_tiny.py": b"raise SystemExit",
        "model.safetensors": WEIGHTS,
        "original/consolidated.safetensors": b"0" * 1000,
        "pytorch_model.bin": b"0" * 1000,
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": b'{"legacy": true}',
    }


def _tokenizer() -> bytes:
    """Return the bytes of a valid tokenizer."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer.to_str().encode()


def weight_requests(hub: HubServer) -> list[str]:
    return [line for line in hub.asked if "safetensors" in line]
