from __future__ import annotations

import json
from pathlib import Path

import pytest
from llm_serving.core.enums import PoolingMode
from llm_serving.errors import ModelError
from llm_serving.hub.base import missing_files, small_files
from llm_serving.models.pooling import Pooling, resolve_pooling, score_tokens
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import check_folder
from support.model_factories import write_safetensors
from support.small_model import CONFIG, write_small_model

LAST = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}


def modules(*kinds: str) -> list[dict[str, object]]:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    prefix = "sentence_transformers.models."
    return [{"idx": i, "path": paths.get(kind, "3"), "type": prefix + kind} for i, kind in enumerate(kinds)]


BERT = {
    "architectures": ["BertModel"],
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 3,
    "num_hidden_layers": 1,
    "vocab_size": 100,
    "max_position_embeddings": 40,
    "id2label": {"0": "LABEL_0"},
}


def spec_of(**changes: object) -> ModelSpec:
    return ModelSpec.from_hugging_face(BERT | changes)


DECODER = ModelSpec.from_hugging_face(CONFIG)


def folder_with(folder: Path, listed: object, pooling: object = LAST) -> Path:
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize("pooling", [LAST, {"embedding_dimension": 64, "pooling_mode": "lasttoken"}])
def test_embedding_model_pooling_follows_its_modules(tmp_path, pooling):
    listed = modules("Transformer", "Pooling", "Normalize")
    assert resolve_pooling("auto", folder_with(tmp_path, listed, pooling), DECODER) == Pooling(
        normalises=True, embedding_only=True
    )
    assert resolve_pooling("none", tmp_path, DECODER) is None
    folder = folder_with(tmp_path, listed[:2])
    assert resolve_pooling("auto", folder, DECODER) == Pooling(normalises=False, embedding_only=True)


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        (LAST | {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, PoolingMode.MEAN),
        (LAST | {"pooling_mode_cls_token": True, "pooling_mode_lasttoken": False}, PoolingMode.FIRST),
        ({"pooling_mode": "mean"}, PoolingMode.MEAN),
        ({"pooling_mode": "cls"}, PoolingMode.FIRST),
        (LAST, PoolingMode.LAST),
    ],
)
def test_encoder_pooling_follows_the_sentence_transformers_folder(tmp_path, pooling, mode):
    listed = modules("Transformer", "Pooling", "Normalize")
    assert resolve_pooling("auto", tmp_path, spec_of()) == Pooling(False, embedding_only=True, mode=PoolingMode.MEAN)
    found = resolve_pooling("auto", folder_with(tmp_path, listed, pooling), spec_of())
    assert found == Pooling(normalises=True, embedding_only=True, mode=mode)
    assert resolve_pooling("last", tmp_path, spec_of()) == Pooling(embedding_only=True)


@pytest.mark.parametrize(
    ("changes", "mode", "sigmoid"),
    [
        ({"architectures": ["BertForSequenceClassification"]}, PoolingMode.FIRST, True),
        (
            {"architectures": ["BertForSequenceClassification"], "classifier_pooling": "mean"},
            PoolingMode.FIRST,
            True,
        ),
        (
            {
                "architectures": ["XLMRobertaForSequenceClassification"],
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            PoolingMode.FIRST,
            False,
        ),
        (
            {"architectures": ["ModernBertForSequenceClassification"], "classifier_pooling": "mean"},
            PoolingMode.MEAN,
            True,
        ),
    ],
)
def test_reranker_pooling_follows_its_class_and_configuration(tmp_path, changes, mode, sigmoid):
    spec = spec_of(**changes)
    expected = Pooling(False, embedding_only=True, mode=mode, scores=True, applies_sigmoid=sigmoid)
    assert resolve_pooling("auto", tmp_path, spec) == expected


def test_classifier_with_unknown_pooling_is_refused():
    with pytest.raises(ModelError, match="classifier_pooling"):
        spec_of(architectures=["ModernBertForSequenceClassification"], classifier_pooling="last")


def test_reranker_may_score_by_the_logits_of_two_tokens(tmp_path):
    write_small_model(tmp_path)
    folder_with(tmp_path, modules("Transformer", "LogitScore"))
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "config.json").write_text(json.dumps({"true_token_id": 7, "false_token_id": 9}))
    spec = check_folder(tmp_path)
    (head,) = [each for each in spec.network.head_operations if each.kind == "linear"]
    assert head.weights["weight"].rows == (7, 9) and spec.network.num_labels == 1
    expected = Pooling(False, embedding_only=True, scores=True)
    assert resolve_pooling("auto", tmp_path, spec) == expected
    (tmp_path / "3" / "config.json").write_text(json.dumps({"true_token_id": "7"}))
    with pytest.raises(ModelError, match="integer `true_token_id`"):
        check_folder(tmp_path)


def test_reranker_tokens_come_from_its_configuration(tmp_path):
    write_small_model(tmp_path, classifier_from_token=["no", "yes"])
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"yes": 7, "no": 9}}}))
    (head,) = [each for each in check_folder(tmp_path).network.head_operations if each.kind == "linear"]
    assert head.weights["weight"].rows == (7, 9)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"yes": 7}}}))
    with pytest.raises(ModelError, match="must hold two tokens"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "is_reranker"),
    [("Qwen3-Reranker-0.6B", True), ("models--Qwen--Qwen3-Reranker-4B/snapshots/1a", True), ("Qwen3-0.6B", False)],
)
def test_a_folder_of_qwen3_reranker_without_modules_is_known_by_its_path(tmp_path, name, is_reranker):
    folder = tmp_path / name
    folder.mkdir(parents=True)
    write_small_model(folder, architectures=["Qwen3ForCausalLM"])
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"yes": 7, "no": 9}}}))
    spec = ModelSpec.from_folder(folder)
    pooling = resolve_pooling("auto", folder, spec)
    assert (spec.network.num_labels == 1) == is_reranker
    assert (pooling is not None and pooling.scores and "{document}" in pooling.pair_template) == is_reranker


def test_the_refusal_of_text_names_the_routes_that_work():
    assert Pooling(scores=True).refusal == "is a reranker, which answers only /v1/score and /rerank"
    assert Pooling().refusal.endswith("only /v1/embeddings, /v1/score and /rerank")


def test_encoder_input_length_is_that_of_sentence_transformers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BERT | {"architectures": ["XLMRobertaModel"], "pad_token_id": 1}))
    assert ModelSpec.from_folder(tmp_path).max_position_embeddings == 38
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    assert ModelSpec.from_folder(tmp_path).max_position_embeddings == 20


def test_pooling_last_serves_embeddings_of_any_model(tmp_path):
    assert resolve_pooling("auto", tmp_path, DECODER) is None
    assert resolve_pooling("last", tmp_path, DECODER) == Pooling(normalises=True, embedding_only=False)


@pytest.mark.parametrize(
    ("listed", "pooling", "text"),
    [
        (modules("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True}, "mode mean is not supported"),
        (modules("Transformer", "Pooling"), LAST | {"pooling_mode_cls_token": True}, "cls_token + lasttoken"),
        (modules("Transformer", "Pooling"), {}, "mode none"),
        (modules("Transformer", "Pooling"), [], "JSON object"),
        (modules("Transformer", "Dense"), LAST, "module Dense is not supported"),
        ([{"path": "../x", "type": "a.Pooling"}], LAST, "must name a folder beside it"),
        ([{"path": "..", "type": "a.Pooling"}], LAST, "must name a folder beside it"),
        ([{"path": "other", "type": "a.Pooling"}], LAST, "is missing"),
        ([{"path": "x" * 300, "type": "a.Pooling"}], LAST, "must name a folder beside it"),
        ([{"path": 5}], LAST, "`path` and `type`"),
        ({}, LAST, "a list of modules"),
    ],
)
def test_pooling_refuses_unsupported_modules(tmp_path, listed, pooling, text):
    with pytest.raises(ModelError, match=text.replace("+", r"\+")):
        resolve_pooling("auto", folder_with(tmp_path, listed, pooling), DECODER)
    assert resolve_pooling("last", tmp_path, DECODER) == Pooling(normalises=True, embedding_only=True)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["ElectraModel"]},
        {"architectures": ["MPNetForMaskedLM"]},
        {"architectures": ["Qwen2ForCausalLM"], "is_causal": False},
        {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True},
    ],
)
def test_pooling_refuses_other_encoders(config):
    with pytest.raises(ModelError, match="is an encoder"):
        ModelSpec.from_hugging_face(CONFIG | config)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaModel"])
def test_embedding_model_needs_no_lm_head_and_no_prefix(tmp_path, architecture):
    config = {"architectures": [architecture], "tie_word_embeddings": False}
    tensors = write_small_model(tmp_path, **config)
    del tensors["lm_head.weight"]
    own = {name.removeprefix("model."): values for name, values in tensors.items()}
    write_safetensors(tmp_path / "model.safetensors", own)
    with pytest.raises(ModelError, match="lm_head"):
        check_folder(tmp_path)
    folder_with(tmp_path, modules("Transformer", "Pooling"))
    assert check_folder(tmp_path).architecture == "LlamaForCausalLM"


def test_pooling_files_are_downloaded_and_required(tmp_path):
    sizes = {"config.json": 1, "modules.json": 1, "1_Pooling/config.json": 1, "1_LogitScore/config.json": 1}
    assert set(small_files(sizes | {"onnx/config.json": 1})) == set(sizes)
    write_small_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert missing_files(tmp_path) == []
    (tmp_path / "modules.json").write_text(json.dumps(modules("Transformer", "Pooling")))
    assert missing_files(tmp_path) == ["1_Pooling/config.json"]


@pytest.mark.parametrize("mode", ["weird", ["cls"], "mean"])
def test_pooling_mode_of_a_config_json_has_no_effect(tmp_path, mode):
    assert resolve_pooling("auto", tmp_path, ModelSpec.from_hugging_face({**CONFIG, "pooling_mode": mode})) is None


@pytest.mark.parametrize("texts", [[[], []], [{}, "yes"], [1, 2]])
def test_score_tokens_that_are_no_texts_are_refused(tmp_path, texts):
    with pytest.raises(ModelError, match="`classifier_from_token` must hold two tokens"):
        score_tokens(tmp_path, {"classifier_from_token": texts})
