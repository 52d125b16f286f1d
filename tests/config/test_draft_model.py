"""Checks of a draft model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from families import models
from llm_serving.cli.main import main
from llm_serving.config import load_config
from llm_serving.config.model_size import model_size
from llm_serving.core.step import (
    DRAFT_WINDOW,
    MAX_DRAFT_REQUESTS,
    MAX_DRAFT_TOKENS,
    blocks_per_draft_request,
    draft_window_start,
)
from llm_serving.errors import ConfigError, ModelError
from llm_serving.executor.supervisor import load_settings
from llm_serving.models.memory import KEPT_STATES, draft_model_bytes, kv_cache_bytes_left, mtp_bytes, weight_bytes
from llm_serving.models.spec import ModelSpec
from llm_serving.text.tokenizer.tokenizer import check_draft_vocabulary
from support.fakes import DEMO_FOLDER, DEMO_SPEC, DEMO_TOKENIZER

METHOD, PATH = "scheduler_config.speculative_method=", "scheduler_config.draft_model_path="
DRAFT = [f"{METHOD}draft_model", f"{PATH}demo"]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return a copy of the shipped model's files, which a test changes."""
    folder = tmp_path / "other"
    shutil.copytree(DEMO_FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "*.json.orig"))
    return folder


def test_load_settings_contain_the_draft_model() -> None:
    config = load_config(None, DRAFT, Path("demo"))
    assert config.scheduler.draft_model_path == DEMO_FOLDER
    assert load_settings(config, 0).draft_model_path == DEMO_FOLDER
    assert load_settings(load_config(None, [], Path("demo")), 0).draft_model_path is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (DRAFT[:1], r"`scheduler_config\.speculative_method` must not be draft_model without .*draft_model_path"),
        (
            DRAFT[1:],
            r"`scheduler_config\.draft_model_path` must come with `scheduler_config\.speculative_method: draft_model`",
        ),
        ([f"{METHOD}none", DRAFT[1]], r"draft_model_path` must come with .*speculative_method: draft_model`\. Given: "),
        (
            [*DRAFT, "cluster_config.tensor_parallel=2"],
            r"`cluster_config\.tensor_parallel` must be 1 with scheduler_config\.draft_model_path\. Given: 2",
        ),
        ([DRAFT[0], f"{PATH}nowhere"], r"scheduler_config\.draft_model_path: nowhere does not exist"),
        ([DRAFT[0], f"{PATH}owner/name"], r"scheduler_config\.draft_model_path: owner/name does not exist"),
    ],
)
def test_settings_that_a_draft_model_does_not_support_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides, Path("demo"))


def test_draft_model_with_the_same_vocabulary_is_accepted(other: Path) -> None:
    check_draft_vocabulary(DEMO_TOKENIZER, DEMO_FOLDER)
    check_draft_vocabulary(DEMO_TOKENIZER, other)


def test_draft_model_with_another_vocabulary_is_refused_with_the_first_differing_token(other: Path, capsys) -> None:
    written = (other / "tokenizer.model").read_bytes()
    piece = DEMO_TOKENIZER.token_bytes(900)
    assert len(piece) > 1
    assert written.count(b"\x0a" + bytes([len(piece)]) + piece + b"\x15") == 1
    changed = piece[:-1] + (b"Q" if piece[-1:] != b"Q" else b"Z")
    (other / "tokenizer.model").write_bytes(
        written.replace(b"\x0a" + bytes([len(piece)]) + piece, b"\x0a" + bytes([len(piece)]) + changed)
    )
    rule = (
        f"scheduler_config.draft_model_path: {other} must have the vocabulary of the model, where token 900 is "
        f"{json.dumps(piece.decode())}. Given: {json.dumps(changed.decode())}"
    )
    with pytest.raises(ModelError) as caught:
        check_draft_vocabulary(DEMO_TOKENIZER, other)
    assert str(caught.value) == rule
    arguments = ["--model", "demo", "--set", DRAFT[0], "--set", f"{PATH}{other}"]
    assert main(["config", "check", *arguments]) == 2
    assert rule in capsys.readouterr().err


def test_draft_model_with_a_smaller_embedding_is_refused(other: Path) -> None:
    size = DEMO_TOKENIZER.vocab_size
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": size - 1}))
    with pytest.raises(ModelError, match=f"{size} tokens. Given: weights for {size - 1}"):
        check_draft_vocabulary(DEMO_TOKENIZER, other)


def test_draft_model_memory_is_taken_from_the_kv_cache() -> None:
    tokens = MAX_DRAFT_REQUESTS * blocks_per_draft_request(16) * 16
    assert tokens == MAX_DRAFT_REQUESTS * (DRAFT_WINDOW + MAX_DRAFT_TOKENS)
    cache = tokens * DEMO_SPEC.kv_bytes_per_token(2)
    assert draft_model_bytes(DEMO_SPEC, 2, 16) > cache + weight_bytes(DEMO_SPEC, 2, None)
    limit = 2 * 10**9
    memory = f"device_config.max_device_memory={limit}"
    plain = load_config(None, [memory], Path("demo"))
    lines = model_size(load_config(None, [memory, *DRAFT], Path("demo"))).lines
    step = plain.scheduler.max_prefill_tokens, plain.model.decode_batch_size
    left = kv_cache_bytes_left(limit, DEMO_SPEC, 2, *step) - draft_model_bytes(DEMO_SPEC, 2, 16)
    assert f"{left // DEMO_SPEC.kv_bytes_per_token(2):,} tokens of context" in lines[-1]
    assert any(line.startswith("draft model, with its cache") for line in lines)
    assert not any("draft" in line for line in model_size(plain).lines)


MTP = f"{METHOD}mtp"


@pytest.fixture
def with_mtp(tmp_path: Path) -> Path:
    """Return the folder of a model whose configuration names an MTP layer."""
    (tmp_path / "config.json").write_text(json.dumps(models.model("deepseek-v3").config))
    return tmp_path


def test_settings_name_the_layer_for_multi_token_prediction(with_mtp: Path) -> None:
    assert load_settings(load_config(None, [MTP], with_mtp), 0).uses_mtp
    assert not load_settings(load_config(None, [], with_mtp), 0).uses_mtp


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster_config.tensor_parallel=2"], "tensor_parallel` must be 1 with scheduler_config.speculative_method: "),
        (["device_config.kernels=plain"], "kernels` must be auto or program or plugin with .*speculative_method: mtp"),
        (["device_config.device_target=Ascend"], "device_target` must be CPU with .*speculative_method: mtp"),
    ],
)
def test_settings_that_mtp_does_not_support_are_refused(with_mtp: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [MTP, *overrides], with_mtp)


@pytest.mark.parametrize("name", ["demo", "kimi-k2", "ernie4.5-moe", "nemotron3"])
def test_mtp_is_refused_for_a_model_whose_layer_is_not_used(tmp_path: Path, name: str) -> None:
    if name != "demo":
        (tmp_path / "config.json").write_text(json.dumps(models.model(name).config))
    folder = Path(name) if name == "demo" else tmp_path
    with pytest.raises(ConfigError, match="must not be mtp: the server uses no layer for multi-token prediction of"):
        load_config(None, [MTP], folder)


def test_memory_of_the_mtp_layer_is_taken_from_the_kv_cache(with_mtp: Path) -> None:
    spec = ModelSpec.from_folder(with_mtp)
    hidden, layer = spec.network.hidden, spec.mtp()
    assert layer is not None
    states = KEPT_STATES * hidden * 2
    assert mtp_bytes(spec, 2, 16, None) == draft_model_bytes(layer, 2, 16) + states
    assert any(
        line.startswith("MTP layer, with its cache") for line in model_size(load_config(None, [MTP], with_mtp)).lines
    )


def test_draft_window_advances_by_half_its_length() -> None:
    half = DRAFT_WINDOW // 2
    assert [draft_window_start(count) for count in (1, DRAFT_WINDOW, DRAFT_WINDOW + 1, 3 * half, 3 * half + 1)] == [
        0,
        0,
        half,
        half,
        2 * half,
    ]
    assert all(half < count - draft_window_start(count) <= DRAFT_WINDOW for count in range(DRAFT_WINDOW + 1, 2000))
