"""Minimal workloads, profiles and configurations for the simulator."""

from __future__ import annotations

from typing import Any

from llm_serving.config import ServingConfig, load_config
from llm_serving_simulator.figures import SimulationResult
from llm_serving_simulator.profile import CostModel, CostTerm, Profile
from llm_serving_simulator.simulation import Simulation
from llm_serving_simulator.workload import Workload, WorkloadRequest, WorkloadStream

STEP_S = 0.01


def create_profile(**changes: Any) -> Profile:
    step = CostModel((CostTerm("step", STEP_S), CostTerm("tokens", 0.0001)))
    return Profile(
        **{"name": "tests", "source": "made up", "measured": False, "step": step, "num_blocks": 64} | changes
    )


def create_load(*due_s: float, concurrency: int | None = None, retries: int = 0, **fields: Any) -> Workload:
    """Return a workload with a request at each time; by default prompts have 8 tokens and answers 4."""
    num_prompt = fields.pop("num_prompt", 8)
    fields = {"stream": "s", "num_output_tokens": 4, "max_tokens": 4} | fields
    requests = [
        WorkloadRequest(due_s=due, prompt_token_ids=[3 + number % 90] * num_prompt, **fields)
        for number, due in enumerate(due_s)
    ]
    return Workload("tests", (WorkloadStream("s", requests, concurrency),), retries, vocab_size=100)


def config_with(**overrides: Any) -> ServingConfig:
    settings = {"serving_config.audit_every": 0, **{key.replace("__", "."): value for key, value in overrides.items()}}
    return load_config(None, [f"{key}={value}" for key, value in settings.items()])


def simulate(load: Workload, profile: Profile | None = None, seed: int = 1, **overrides: Any) -> SimulationResult:
    return Simulation(config_with(**overrides), load, profile or create_profile(), seed).run()
