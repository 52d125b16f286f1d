"""`llm-serving config check`: print the effective configuration and what follows from it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Final

from llm_serving.cli.arguments import check_weights, load, stored_size
from llm_serving.config.report import describe
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.core.enums import ExactnessName
from llm_serving.core.sampling_params import GENERATION_CONFIG, generation_defaults, generation_end_ids
from llm_serving.engine.replica import build_scheduler
from llm_serving.models.spec import CONFIG_NAME, ModelSpec
from llm_serving.text.tokenizer.tokenizer import Tokenizer, check_draft_vocabulary, notice_of_unknown_tokens
from llm_serving.worker.exactness import guarantee, has_experts_in_dtype

PACKAGES: Final = "`ms_custom_ops` and the CANN package `ops-batchinvariant`"


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments)
    for model in config.models or (config,):
        check_weights(model)
        head = [f"# --- {model.model.model_name} ---"] if config.models else []
        lines = [*head, describe(model), *_tokens(model), *_sampling(model), *_memory(model), *_bounds(model)]
        lines += _guarantees(model)
        print("\n".join(lines), flush=True)
    return 0


def _tokens(config: ServingConfig) -> list[str]:
    path = config.model.model_path
    if path is None:
        return []
    tokenizer = Tokenizer.load(path, config.model.tokenizer_path)
    if config.scheduler.draft_model_path is not None:
        check_draft_vocabulary(tokenizer, config.scheduler.draft_model_path)
    lines = ["# a text ends with:", *(f"#   - {line}" for line in describe_end_tokens(config.model, tokenizer))]
    notice = notice_of_unknown_tokens(tokenizer, ModelSpec.from_folder(path).vocab_size)
    return lines if notice is None else [*lines, f"# notice: {notice}"]


def _sampling(config: ServingConfig) -> list[str]:
    if config.model.generation_config == "none":
        return []
    defaults = generation_defaults(config.model.model_path)
    text = ", ".join(
        # seven digits, because the values are stored in single precision
        f"{name} {value:.7g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in defaults.items()
    )
    return [f"# defaults of requests ({GENERATION_CONFIG}): {text}"] if text else []


def _memory(config: ServingConfig) -> list[str]:
    if config.model.model_path is None:
        return []
    return ["# memory of a WorkAgent:", *(f"#   {line}" for line in stored_size(config).lines)]


def _guarantees(config: ServingConfig) -> list[str]:
    """Return YAML comments that say what `exactness` guarantees on Ascend, with and without optional packages."""
    exactness, model = config.device.exactness, config.model
    if config.device.device_target != "Ascend" or model.model_path is None:
        return []
    network = ModelSpec.from_folder(model.model_path).network
    has_experts = has_experts_in_dtype(network, config.quant.quantization)
    is_native = model.implementation == "native" and model.mindir_path is None
    guarantees = guarantees_on_ascend(exactness, is_native=is_native, has_experts=has_experts)
    lines = (f"{installed}: {text}" if installed else text for installed, text in guarantees.items())
    return [f"# answers with device_config.exactness: {exactness}:", *(f"#   {line}" for line in lines)]


def _bounds(config: ServingConfig) -> list[str]:
    if config.pa.num_blocks is None:
        return []
    spec = None if config.model.model_path is None else ModelSpec.from_folder(config.model.model_path)
    if spec is None:
        scheduler = build_scheduler(config, config.pa.num_blocks, config.pa.num_swap_blocks)
    else:
        layout, slots = config.served_spec(spec).layout, config.num_state_slots(spec.state_bytes)
        sizes = layout.num_blocks(config.pa.num_blocks), layout.num_blocks(config.pa.num_swap_blocks)
        scheduler = build_scheduler(config, *sizes, windows=layout.windows, num_state_slots=slots)
    return ["# bounds:", *(f"#   - {bounds}" for bounds in scheduler.bounds)]


def describe_end_tokens(model: ModelConfig, tokenizer: Tokenizer) -> list[str]:
    """Return a line for each end token: id, text, and the files that name it. Raise ModelError for a damaged file."""
    return [
        f"{token_id} {json.dumps(tokenizer.token_text(token_id), ensure_ascii=False)} ({', '.join(names)})"
        for token_id, names in _sources(model, tokenizer).items()
    ] or ["nothing but its length"]


def _sources(model: ModelConfig, tokenizer: Tokenizer) -> dict[int, list[str]]:
    own = ModelSpec.from_folder(model.folder).eos_token_ids
    generation = generation_end_ids(model.folder)
    configured = [] if model.end_token is None or model.end_token in own else [model.end_token]
    of_tokenizer = [
        each for each in tokenizer.eos_token_ids if each == tokenizer.eos_token_id or each not in generation
    ]
    names: dict[int, list[str]] = {}
    for name, ids in (
        ("model_config.end_token", configured),
        (CONFIG_NAME, own),
        (GENERATION_CONFIG, generation),
        ("tokenizer", of_tokenizer),
    ):
        for token_id in ids:
            names.setdefault(token_id, []).append(name)
    return names


def guarantees_on_ascend(exactness: str, *, is_native: bool, has_experts: bool) -> Mapping[str, str]:
    """Return {condition: guarantee} for WorkAgents on Ascend. A condition says which packages are installed; it is ""
    if the guarantee does not depend on them. `is_native`: whether the network is this project's own, not read from
    exported graphs. `has_experts`: see `guarantee`.
    """
    if exactness == ExactnessName.FAST:
        return {"": guarantee(exactness, "ascend_fast")}
    if not is_native:
        return {"": guarantee(exactness, "ascend")}
    invariant = guarantee(exactness, "ascend_invariant", has_experts)
    return {f"with {PACKAGES}": invariant, "without both": guarantee(exactness, "ascend")}
