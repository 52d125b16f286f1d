"""Small models of every family whose heads have a size that Ascend accepts, compared with NumPy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from families import models
from families.drawn import integers
from families.weights import weights_of
from llm_serving.config.sections.device import ASCEND_HEAD_MULTIPLE
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader
from support.model_factories import to_bfloat16, write_safetensors
from support.network_reference import parameters, run, step_of_prompt
from support.step_factories import step_input

LONGEST = 1024
"""Context of a model whose rotary embedding is not scaled, in tokens."""
BLOCK_SIZE = 16
NUM_BLOCKS = LONGEST // BLOCK_SIZE + 8
NUM_DECODED = 8
"""Tokens at the end of the context that are computed one in a step."""
EVERY = 7
"""Distance of the compared positions of a prompt. It does not divide the block size."""
EXPERTS_SHARE = 0.7
"""Share of positions, those with the smallest errors, that count in a model with experts. Where two experts have nearly
equal scores, rounding chooses between them, and all logits of the position change.
"""
QUANTIZED_SHARE = 0.5
"""Share of positions that count with quantized weights, whose errors vary more."""
_LENGTH_KEYS = ("max_position_embeddings", "model_max_length", "seq_length")
_FIRST_PLAIN_TOKEN = 8


def write(name: str, folder: Path) -> None:
    """Write a model. Raise ModelError if its config does not allow the size of its heads."""
    config = device_config(models.model(name).config)
    (folder / "config.json").write_text(json.dumps(config))
    model = dataclasses.replace(models.model(name), config=config, shapes=ModelSpec.from_folder(folder).tensors)
    tensors = {tensor: to_bfloat16(values) for tensor, values in weights_of(name, model).items()}
    write_safetensors(folder / "model.safetensors", tensors)


def device_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with heads of `ASCEND_HEAD_MULTIPLE` and a context of `LONGEST`. Heads that are stored in a
    multiple of it, and the context of a scaled rotary embedding, do not change. Neither do heads of models with states
    or latent attention, which Ascend refuses.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    changed: dict[str, Any] = {} if scaling else {key: LONGEST for key in _LENGTH_KEYS if key in config}
    spec = ModelSpec.from_hugging_face(config)
    if spec.states or "kv_lora_rank" in config or all(size % ASCEND_HEAD_MULTIPLE == 0 for size in spec.head_dims):
        return {**config, **changed}
    heads = config["num_attention_heads"]
    times = ASCEND_HEAD_MULTIPLE // (config.get("head_dim") or config["hidden_size"] // heads)
    if "head_dim" in config:
        changed["head_dim"] = ASCEND_HEAD_MULTIPLE
    else:
        changed["hidden_size"] = ASCEND_HEAD_MULTIPLE * heads
    if "rope_scaling" in config and scaling:  # some have lists of a factor for each pair of elements
        factors = {key: np.repeat(each, times).tolist() for key, each in scaling.items() if isinstance(each, list)}
        changed["rope_scaling"] = {**scaling, **factors}
    return {**config, **changed}


class _Request(NamedTuple):
    tokens: list[int]
    blocks: list[int]
    expected: np.ndarray
    """Log-probabilities [len(tokens), vocab_size] after each token."""
    largest: np.ndarray
    """Largest absolute logit after each token."""


def errors(name: str, folder: Path, context: int, runner: Any, quantized: bool) -> tuple[float, ...]:
    """Return the errors of whole prompts, of later chunks of a prompt and of decoding, as shares of the largest logit:
    the largest one of all positions, or of a share of them if the model has experts or quantized weights.

    Two requests share each step: one fills the context, the other is short. Their blocks are in no order.

    Args:
        name: The model.
        folder: Its folder.
        context: Tokens that the runner serves it with.
        runner: A `ModelRunner` that has computed no step.
        quantized: Whether it quantizes the weights.
    """
    blocks = [index * 5 % NUM_BLOCKS for index in range(NUM_BLOCKS)]
    num_long = -(-context // BLOCK_SIZE)
    long = _request(name, folder, context, context, blocks[:num_long])
    short = _request(name, folder, context, 2 * BLOCK_SIZE, blocks[num_long : num_long + 2])
    half, end = context // 2, context - NUM_DECODED
    plan = [((0, half), (0, BLOCK_SIZE + 3)), ((half, end), (BLOCK_SIZE + 3, BLOCK_SIZE + 4))]
    plan += [((end + i, end + i + 1), (BLOCK_SIZE + 4 + i, BLOCK_SIZE + 5 + i)) for i in range(NUM_DECODED)]
    found = [_step(runner, number, ((long, parts[0]), (short, parts[1]))) for number, parts in enumerate(plan)]
    has_experts = any(each.kind == "experts" for each in runner.spec.network.operations)
    share = QUANTIZED_SHARE if quantized else EXPERTS_SHARE if has_experts else 1.0
    prompt, chunk, *decode = found
    return tuple(float(np.quantile(each, share)) for each in (prompt, chunk, np.concatenate(decode)))


def _request(name: str, folder: Path, context: int, count: int, blocks: list[int]) -> _Request:
    spec = dataclasses.replace(ModelSpec.from_folder(folder), max_position_embeddings=context)
    tokens = [int(each) for each in integers(f"{name}/device/{count}", count, _FIRST_PLAIN_TOKEN, spec.vocab_size)]
    weights = parameters(spec.network, WeightReader(folder), context)
    logits = run(spec.network.operations, weights, step_of_prompt(tokens, spec.network, every=True)).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return _Request(tokens, blocks, expected, np.abs(logits).max(axis=1))


def _step(runner: Any, number: int, parts: Sequence[tuple[_Request, tuple[int, int]]]) -> np.ndarray:
    """Compute a step of the tokens [start, end) of some requests and return its errors; NaN if a result is missing."""
    vocab_size = parts[0][0].expected.shape[1]
    rows = [(request.tokens[start:end], start, request.blocks) for request, (start, end) in parts]
    at = [
        (row, index)
        for row, (_, (start, end)) in enumerate(parts)
        for index in sorted({*range(0, end - start, EVERY), end - start - 1})
    ]
    scores = [(row, index, [0], vocab_size) for row, index in at]
    output = runner.execute(step_input(rows, step=number, samples=[], scores=scores))
    if output.row_errors:
        return np.full(len(at), np.nan)
    worst = []
    for result, (row, index) in enumerate(at):
        request, (start, _) = parts[row]
        token_ids, logprobs = output.scores.top.of(result)
        expected = request.expected[start + index][token_ids]
        worst.append(np.abs(expected - logprobs).max() / request.largest[start + index])
    return np.array(worst)
