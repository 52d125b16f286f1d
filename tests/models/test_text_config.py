"""Folders of models that also take images are served as text models."""

import json

import numpy as np
import pytest
from families import models
from llm_serving.errors import ModelError
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader
from safetensors.numpy import save_file
from support.weights import load_parameter

WITHIN = {"model.": "model.language_model."}
MODELS = {
    "qwen3.5-tied": ("Qwen3_5ForConditionalGeneration", WITHIN, "model.visual.patch_embed"),
    "qwen3.5-moe": ("Qwen3_5MoeForConditionalGeneration", WITHIN, "model.visual.patch_embed"),
    "llama4": ("Llama4ForConditionalGeneration", {"": "language_model."}, "vision_model.patch_embedding"),
    "gemma3n": ("Gemma3nForConditionalGeneration", WITHIN, "model.vision_tower.stem"),
    "gemma4": ("Gemma4ForConditionalGeneration", WITHIN, "model.embed_vision.projection"),
}
"""Text model -> (class of the multimodal model, {tensor prefix: prefix in that model}, a tensor for images)."""


def write_with_images(name, folder, **changes):
    """Write a text model of `families` as a part of a model that also takes images."""
    folder.mkdir()
    text = models.model(name).config
    architecture, prefixes, of_images = MODELS[name]
    config = {"architectures": [architecture], "text_config": text, "vision_config": {"depth": 2}} | changes
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"{of_images}.weight": np.ones((4, 4), np.float32)}
    for tensor, values in models.weights(name).items():
        prefix = next((each for each in prefixes if tensor.startswith(each)), None)
        tensors[tensor if prefix is None else prefixes[prefix] + tensor.removeprefix(prefix)] = values
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", MODELS)
def test_text_model_has_the_weights_of_its_own_folder(tmp_path, name):
    models.write(name, tmp_path / "text", dtype="float32")
    write_with_images(name, tmp_path / "images")
    text, images = (ModelSpec.from_folder(tmp_path / each) for each in ("text", "images"))
    assert [each.kind for each in images.network.operations] == [each.kind for each in text.network.operations]
    assert (images.max_position_embeddings, images.states) == (text.max_position_embeddings, text.states)
    readers = [WeightReader(tmp_path / each) for each in ("text", "images")]
    for one, other in zip(text.network.weights, images.network.weights, strict=True):
        assert np.array_equal(load_parameter(one, readers[0], 64), load_parameter(other, readers[1], 64))
    for unused in images.network.optional:
        readers[1].ignore(unused)
    readers[1].check_all_read()


def test_text_config_must_be_an_object(tmp_path):
    write_with_images("qwen3.5-tied", tmp_path / "images", text_config=[])
    with pytest.raises(ModelError, match=r"config\.json: `text_config` must be an object"):
        ModelSpec.from_folder(tmp_path / "images")
