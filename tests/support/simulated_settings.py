"""The random settings of a simulated master: scheduler, replicas, machines and limits."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.cluster import ClusterConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.core.window import LayerWindow
from llm_serving.scheduler import PreemptionMode
from llm_serving.scheduler.policies import ORDERS
from support.factories import create_classes
from support.simulated_client import MAX_MODEL_LEN
from support.simulated_clock import Clock
from support.simulated_network import SimulatedNetwork

GROUPS = (
    (LayerWindow(), LayerWindow(5)),
    (LayerWindow(), LayerWindow(9), LayerWindow(9), LayerWindow(3)),
    (LayerWindow(), LayerWindow(), LayerWindow(6, is_chunked=True)),
)
"""Windows of groups of layers."""
ROLES = (("prefill", "decode"), ("prefill", "both"), ("prefill", "decode", "decode"), ("prefill", "prefill", "decode"))


def draw_scheduler(rng: random.Random) -> dict[str, Any]:
    share = rng.choice((1.0, 1.0, 0.5))
    window = rng.choice((None, None, 3, 9))
    options = {
        "policy": rng.choice(("prefill_first", "prefill_first", "decode_first", "mixed", "throughput", "fcfs")),
        "num_blocks": rng.choice((12, 13, 15, 18, 40)) if window is None else rng.choice((5, 8, 13)),
        "window": window,
        "block_size": 4,
        "num_swap_blocks": rng.choice((0, 8, 30)),
        "prefix_caching": rng.random() < 0.6,
        "max_num_batched_tokens": rng.choice((8, 16, 48)),
        "max_num_seqs": rng.choice((2, 4, 8)),
        "max_prefill_seqs": rng.choice((1, 3, 8)),
        "max_model_len": MAX_MODEL_LEN,
        "max_decode_gap": rng.choice((1, 2, 4)),
        "max_prefill_gap": rng.choice((1, 4)),
        "max_preemptions": rng.choice((0, 1, 3)),
        "max_overtakes": rng.choice((0, 2)),
        "max_head_start_steps": rng.choice((0, 8, 10**6)),
        "quantum_steps": rng.choice((1, 16)),
        "max_running_per_tenant": rng.choice((None, None, None, 1)),
        "order": rng.choice(sorted(ORDERS)),
        "max_long_prefill_tokens": rng.choice((None, 6)),
        "separate": rng.random() < 0.3,
        "preemption_mode": rng.choice(list(PreemptionMode)),
        "static_batching": rng.random() < 0.1,
        "classes": create_classes(
            ageing_steps=rng.choice((2, 20)),
            low={"max_running_share": share, "max_kv_share": share},
            high={"max_waiting": rng.choice((None, 1))},
        ),
    }
    # Without a draw from `rng`, on which the rest of the seed depends.
    drawn = random.Random(repr([options[name] for name in ("num_blocks", "max_prefill_gap", "order", "quantum_steps")]))
    options["num_spare_states"] = drawn.choice((None, None, None, 0, 3, 10))
    if window is None and options["num_spare_states"] is None and drawn.random() < 0.4:
        options["windows"] = drawn.choice(GROUPS)
        options["num_blocks"] *= len(options["windows"])
    return options


def draw_reloads(rng: random.Random) -> deque[tuple[int, random.Random]]:
    """Return (round, generator of the new rules) of each reload; a quarter of the seeds has some."""
    rounds = sorted(rng.randint(0, 40) for _ in range(rng.choice((1, 1, 3)))) if rng.random() < 0.25 else []
    return deque((each, random.Random(rng.random())) for each in rounds)


def draw_cluster(rng: random.Random, config: ServingConfig, num_replicas: int) -> ClusterConfig:
    """Draw roles of the replicas and their transfer blocks; three of four seeds have `num_replicas` replicas without
    roles.
    """
    if rng.random() < 3 / 4 or config.model.batching_strategy == "static":
        return ClusterConfig(replicas=num_replicas)
    roles = rng.choice(ROLES)
    return ClusterConfig(replicas=len(roles), roles=roles, num_transfer_blocks=rng.choice((1, 5, 12, 60)))


def draw_network(rng: random.Random, clock: Clock, num_machines: int | None) -> SimulatedNetwork | None:
    """Return a network, or None if all WorkAgents run on the master's machine, as in two of three seeds without
    `num_machines`.
    """
    is_local = rng.random() < 2 / 3
    if num_machines == 0 or (is_local and num_machines is None):
        return None
    silence_s = rng.choice((0.3, 3.0))  # shorter and longer than a step may take
    drawn = rng.choice((1, 2, 3))
    return SimulatedNetwork(rng, clock, num_machines or drawn, rng.choice((0.1, 0.5)), silence_s)


def draw_config(rng: random.Random, scheduler: dict[str, Any]) -> ServingConfig:
    """Return the configuration that admission control needs."""
    return ServingConfig(
        model=ModelConfig(
            max_generate_length=MAX_MODEL_LEN,
            decode_batch_size=scheduler["max_num_seqs"],
            batching_strategy="static" if scheduler["static_batching"] else "continuous",
        ),
        scheduler=SchedulerConfig(
            max_waiting_queue=rng.choice((1, 3, 100)),
            max_waiting_tokens=rng.choice((None, None, 40)),
        ),
        request_classes=scheduler["classes"],
    )
