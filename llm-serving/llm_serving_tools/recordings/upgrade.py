"""Reads the scheduler's state in recordings of formats 14 and 17, whose classes and attributes had other names."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

from llm_serving.core.window import CacheGroups
from llm_serving.scheduler.stages import DecodeStage

OLD_FORMATS: Final = (14, 17)
_PACKAGE: Final = "llm_serving"
_CLASSES: Final = {
    "Arrival": "ArrivalOrder",
    "BlockMove": "BlockMoveKind",
    "Changes": "LimiterChanges",
    "Deadline": "DeadlineOrder",
    "Deciders": "SchedulerComponents",
    "Exports": "TransferPool",
    "Fair": "FairOrder",
    "FairShare": "TenantTokenCounters",
    "GivingWay": "Preemptor",
    "Move": "BlockMove",
    "Need": "SlotDemand",
    "Places": "RunningSlots",
    "Prompts": "PrefillStage",
    "Reprioritiser": "PriorityChanger",
    "Rules": "SchedulingRules",
    "Shortest": "ShortestOrder",
    "TenantGate": "TenantLimiter",
    "Turns": "WeightedFairSharing",
    "Waits": "WaitingRequests",
    "_Offer": "_TenantEntry",
}
_COMPONENTS: Final = {"_giving_way": "_preemptor", "_places": "_slots", "_waits": "_waiting_requests"}
_ATTRIBUTES: Final[dict[str, dict[str, str]]] = {
    "BlockManager": {
        "_alone": "_unshared",
        "_arriving": "_import_tables",
        "_moves": "_block_moves",
        "_names": "_block_hashes",
        "_spent": "_released_imports",
        "exports": "transfer_pool",
    },
    "BlockPool": {"_blocks_by_name": "_blocks_by_hash", "_names": "_hashes"},
    "ClassBounds": {"steps_an_admission": "steps_per_admission"},
    "ClassQueue": {
        "_displaced": "_returning",
        "_num_overtakes": "_num_bypasses",
        "_offers": "_tenant_entries",
        "shares": "token_counters",
    },
    "PrefillStage": _COMPONENTS,
    "Preemptor": {**_COMPONENTS, "_preempted": "preempted"},
    "PriorityChanger": _COMPONENTS,
    "QueueKeys": {"_max_head_start": "_max_priority_boost"},
    "Request": {
        "admission": "admission_number",
        "departs": "is_migrating",
        "entered": "class_sequence",
        "entered_at_step": "class_entry_step",
        "moved_at_step": "class_change_step",
        "moves": "wants_migration",
        "num_results": "num_prompt_logprobs_received",
        "num_results_wanted": "num_prompt_logprobs_wanted",
        "num_tokens_when_lost": "num_tokens_at_loss",
        "waits_for_reply": "needs_known_output",
    },
    "RunningSlots": {"_most": "_max_running", "blocks_held": "blocks_by_class", "held": "slots_by_class"},
    "Schedule": {"departures": "migrating", "has_drafts": "has_draft_tokens"},
    "SchedulerComponents": {
        "giving_way": "preemptor",
        "places": "slots",
        "prompts": "prefill",
        "reprioritiser": "priority_changer",
        "waits": "waiting_requests",
    },
    "SchedulerLimits": {"turn_steps": "quantum_steps"},
    "TenantLimiter": {"_changed": "_changed_tenants", "_is_dealt": "_uses_leases", "_names_of_full": "full_tenants"},
    "TransferPool": {"_away": "_handed_over", "_leaving": "_pending"},
    "WaitingQueue": {"turns": "sharing"},
    "WaitingRequests": {
        "_places": "_slots",
        "gate": "tenant_limiter",
        "laid_aside": "paused",
        "num_entered": "num_arrivals",
    },
    "WeightedFairSharing": {
        "_computed": "_prefill_usage",
        "_is_shared": "is_shared",
        "_least_part": "_weight_divisor",
        "_num_places": "_num_slots",
        "_paid": "_usage",
        "_turn_steps": "_quantum_steps",
        "_wanting": "_with_demand",
        "ahead": "deprioritized",
    },
    "_Tenant": {"part": "num_leased", "passed": "released", "turns": "sharing"},
}
_ATTRIBUTES_OF_17: Final = {"WeightedFairSharing": {"_is_shared": "is_shared"}}


def upgrade_snapshot(
    version: int, layouts: dict[str, list[str]], nodes: list[Any]
) -> tuple[dict[str, list[str]], list[Any]]:
    """Convert a snapshot of format `version` to the present names of classes and attributes."""
    classes, renamed_attributes = (_CLASSES, _ATTRIBUTES) if version == 14 else ({}, _ATTRIBUTES_OF_17)
    names = {name: _present_name(name, classes) for name in {node[0] for node in nodes} | layouts.keys()}
    new_layouts = {}
    for name, attributes in layouts.items():
        renamed = renamed_attributes.get(names[name].partition(":")[2], {})
        new_layouts[names[name]] = [renamed.get(each, each) for each in attributes]
    return new_layouts, [[names[node[0]], *node[1:]] for node in nodes]


def upgrade_scheduler(version: int, attributes: dict[str, Any]) -> dict[str, Any]:
    if version != 14:
        return attributes
    components = attributes.pop("_deciders")
    limits, policy, order = attributes["limits"], attributes["policy"], attributes["order"]
    blocks = attributes["blocks"]
    _upgrade_blocks(vars(blocks))
    blocks.max_request_tokens = blocks.groups.max_request_tokens(blocks.block_size, blocks.pool.num_blocks)
    gaps, sharing = {each.name: each.max_prompt_gap for each in components.bounds}, components.waiting.sharing
    decode = DecodeStage(limits.max_prefill_gap, policy, blocks, sharing, components.preemptor, gaps)
    decode.num_steps_without_prefill = attributes.pop("_prefill_gap")
    components.decode = decode
    components.waiting.service = attributes.pop("_service")
    components.waiting._shares_among_tenants = order.shares_fairly
    components.waiting_requests.tenant_limiter.is_active = True
    del attributes["_max_prompt_gaps"]
    renamed = {
        "_closed": "_closed_classes",
        "_giving_way": "_preemptor",
        "_num_drafts": "_num_with_drafts",
        "_num_moving": "_num_migrating",
        "_num_telling": "_num_with_prompt_results",
        "_told_at_step": "_usage_step",
        "places": "slots",
        "prompts": "prefill",
        "waits": "waiting_requests",
    }
    new = {renamed.get(name, name): value for name, value in attributes.items()}
    return new | {"_components": components, "decode": decode, "running": components.slots.running}


def _upgrade_blocks(blocks: dict[str, Any]) -> None:
    """Convert a block manager of an older format. All layers form one group. No free block is marked for first use."""
    groups = blocks["groups"] = CacheGroups((blocks.pop("window"),))
    blocks |= {"num_groups": 1, "has_sliding_window": groups.is_sliding, "max_blocks": [blocks.pop("most_blocks")]}
    blocks["_kept_ends"] = {}
    for name in ("_tables", "_host_tables", "_import_tables"):
        blocks[name] = {request_id: (table,) for request_id, table in blocks[name].items()}
    blocks["tables"] = blocks.pop("_tables")
    for pool in (blocks["pool"], blocks["host_pool"], blocks["transfer_pool"].pool):
        pool._early = OrderedDict()


def _present_name(name: str, classes: dict[str, str]) -> str:
    _, colon, class_name = name.partition(":")
    if not colon:
        return name
    class_name = classes.get(class_name, class_name)
    return next((f"{module}:{class_name}" for module in _modules_with(class_name)), name)


def _modules_with(class_name: str) -> Iterator[str]:
    for part in ("core", "kvcache", "scheduler"):
        prefix = f"{_PACKAGE}.{part}."
        for name, module in list(sys.modules.items()):
            if name.startswith(prefix) and getattr(vars(module).get(class_name), "__module__", None) == name:
                yield name.removeprefix(f"{_PACKAGE}.")
