"""Random configurations of a scheduler and random loads for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from llm_serving.core.request import Request
from llm_serving.scheduler import PreemptionMode
from llm_serving.scheduler.components import SchedulingRules
from llm_serving.scheduler.policies import ORDERS, POLICIES
from support.factories import create_classes, create_request, create_scheduler
from support.scheduler_run import SchedulerRun
from support.simulated_settings import GROUPS

shares = st.sampled_from([0.1, 0.5, 1.0])


@st.composite
def scheduler_options(draw: st.DrawFn) -> dict[str, Any]:
    """Draw options with small caches, few slots and small limits, so that each of them is reached."""
    max_num_seqs = draw(st.integers(1, 5))
    window = draw(st.sampled_from([None, None, 1, 5, 8, 13]))
    windows = draw(st.sampled_from([(), (), *GROUPS])) if window is None else ()
    changes = {
        name: {
            "weight": draw(st.integers(1, 4)),
            "max_running_share": draw(shares),
            "max_kv_share": draw(shares),
        }
        for name in ("high", "normal", "low")
    }
    return {
        "policy": draw(st.sampled_from(sorted(POLICIES))),
        "separate": draw(st.booleans()),
        "static_batching": draw(st.sampled_from([False, False, True])),
        "preemption_mode": draw(st.sampled_from(PreemptionMode)),
        "swap_block_cost_tokens": draw(st.sampled_from([0.5, 3.0])),
        "num_swap_blocks": draw(st.sampled_from([0, 4, 20])),
        "prefix_caching": draw(st.booleans()),
        "num_blocks": draw(st.integers(8 if window is None else 4, 16)) * max(1, len(windows)),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": draw(st.integers(max_num_seqs, 24)),
        "max_prefill_seqs": draw(st.integers(1, 5)),
        "max_decode_gap": draw(st.integers(1, 3)),
        "max_prefill_gap": draw(st.integers(1, 4)),
        "max_preemptions": draw(st.integers(0, 3)),
        "max_overtakes": draw(st.integers(0, 3)),
        "max_head_start_steps": draw(st.sampled_from([0, 4, 10**6])),
        "quantum_steps": draw(st.integers(1, 8)),
        "order": draw(st.sampled_from(sorted(ORDERS))),
        "max_long_prefill_tokens": draw(st.sampled_from([None, 1, 4])),
        "max_model_len": 32,
        "window": window,
        "windows": windows,
        "max_steps_in_flight": draw(st.integers(1, 2)),
        "num_spare_states": None if windows else draw(st.sampled_from([None, None, 0, 1, 3, 30])),
        "classes": create_classes(draw(st.integers(0, 8)), **changes),
    }


STAY = (
    "max_preemptions",
    "static_batching",
    "max_steps_in_flight",
    "window",
    "windows",
    "num_blocks",
    "num_swap_blocks",
)
"""Options that no reload changes."""


def other_rules(options: dict[str, Any], others: dict[str, Any]) -> SchedulingRules:
    """Return the rules of `others` that a scheduler of `options` can adopt."""
    other = create_scheduler(**others | {name: options[name] for name in STAY})
    return SchedulingRules(other.limits, other.policy, other.classes, other.order, other.blocks.prefix_caching)


arrivals = st.lists(
    st.tuples(
        st.integers(0, 12),  # step of arrival
        st.integers(1, 22),  # prompt tokens
        st.integers(1, 10),  # output tokens
        st.integers(-1, 1),  # priority
        st.sampled_from("ab"),  # tenant
        st.one_of(st.none(), st.integers(0, 11)),  # index of the parent of a fork
        st.sampled_from([None, None, None, *range(12)]),  # steps until it is aborted
        st.sampled_from([False, False, True]),  # waits for replies
    ),
    min_size=1,
    max_size=12,
)


def create_load(arrivals: list[tuple[Any, ...]]) -> list[tuple[int, int | None, Request]]:
    """Return (step of arrival, step of an abort, request) of each request; a fork has its parent's prompt or a prefix
    of it.
    """
    load: list[tuple[int, int | None, Request]] = []
    for index, (step, prompt, output, priority, tenant, parent, abort, waits) in enumerate(arrivals):
        request = create_request(prompt, max_tokens=output, priority=priority, tenant=tenant, seed=index)
        request.needs_known_output = waits
        if parent is not None and parent < index:
            step, _, source = load[parent]
            shared = source.prompt_token_ids[: max(prompt, source.num_prompt_tokens - 3)]
            request = replace(
                request,
                prompt_token_ids=shared + [7] * max(0, min(prompt, 22) - len(shared)),
                fork_of=source.request_id,
                tenant=source.tenant,
            )
        load.append((step, None if abort is None else step + abort, request))
    return load


def arrive(run: SchedulerRun, load: list[tuple[int, int | None, Request]], step: int) -> None:
    """Add and abort the requests of `create_load` that are due before a step."""
    for arrival, abort, request in load:
        if arrival == step:
            run.add(request)
        if abort == step:
            run.abort(request)
