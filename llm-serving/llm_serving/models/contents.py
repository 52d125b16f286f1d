"""Whether a folder holds the weights of its config.json: asked by `config check`, by a start and by every WorkAgent."""

from __future__ import annotations

from pathlib import Path

from llm_serving.formats.compare import check_tensors
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weights import WeightReader


def check_folder(folder: Path) -> ModelSpec:
    """Reads config.json and the headers of the weights, and no weight.

    Returns:
        The model.

    Raises:
        ModelError: A form that is not read, a damaged file, or other tensors than the model has.
    """
    spec = ModelSpec.from_folder(folder)
    reader = WeightReader(folder, spec.scheme)
    spare = {**reader.spare_biases(), **spare_tensors(spec)}
    check_tensors(str(folder), spec.tensors, reader.shapes(), spare)
    return spec


def spare_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """What may be there besides: some exporters write a tied table twice."""
    return dict.fromkeys(spec.network.optional, (spec.vocab_size, spec.network.hidden))
