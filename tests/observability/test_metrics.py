"""The metrics of a scrape."""

from __future__ import annotations

import time

from llm_serving import __version__
from llm_serving.core.request import FinishReason
from llm_serving.core.step import BlockMove, BlockMoveKind
from llm_serving.observability.metric_families import Histogram
from llm_serving.observability.metrics import Metrics, ReplicaCounts, StateSlotUsage, SwapLoad, WorkAgentMemory
from llm_serving.scheduler.schedule import Preemption
from prometheus_client.parser import text_string_to_metric_families


def scrape(metrics):
    """Return (name, labels without model_name) -> value."""
    content, _ = metrics.render()
    return {
        (sample.name, *sorted(value for name, value in sample.labels.items() if name != "model_name")): sample.value
        for family in text_string_to_metric_families(content.decode())
        for sample in family.samples
    }


def test_metrics_of_dashboards_exist_from_the_start():
    names = {name for name, *_ in scrape(Metrics("demo"))}
    assert names >= {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_count",
        "vllm:request_time_per_output_token_seconds_sum",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_queue_time_seconds_bucket",
        "vllm:request_prefill_time_seconds_bucket",
        "vllm:request_decode_time_seconds_bucket",
        "vllm:request_inference_time_seconds_bucket",
        "vllm:request_prompt_tokens_bucket",
        "vllm:request_generation_tokens_bucket",
        "vllm:num_requests_swapped",
        "process_start_time_seconds",
        "vllm:request_success_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:iteration_tokens_total_bucket",
        "llm_serving:bound_violations_total",
        "llm_serving:audit_mismatch_total",
        "llm_serving:worker_restarts_total",
        "llm_serving:steps_total",
    }


def test_graph_compilations_are_read_at_every_scrape():
    metrics, counts = Metrics("demo"), [1]
    metrics.watch_agent(3, lambda: counts[0])
    assert scrape(metrics)["llm_serving:graph_compilations", "3"] == 1
    counts[0] = 2
    assert scrape(metrics)["llm_serving:graph_compilations", "3"] == 2


def test_load_is_exported_by_replica_and_machine():
    metrics, machines = Metrics("demo"), ["10.0.0.2"]
    metrics.watch_agent(1, lambda: 1, lambda: machines[0])
    metrics.record_load(3, 2, 0.5, 8, replica=1)
    metrics.record_load(1, 0, 0.25, replica=0)
    found = scrape(metrics)
    assert found["llm_serving:replica_requests_running", "1", "10.0.0.2"] == 3
    assert found["llm_serving:replica_requests_waiting", "1", "10.0.0.2"] == 2
    assert found["llm_serving:replica_kv_cache_usage", "", "0"] == 0.25
    machines[0] = "10.0.0.3"
    assert scrape(metrics)["llm_serving:replica_requests_running", "1", "10.0.0.3"] == 3


def test_memory_of_work_agents_is_read_at_every_scrape():
    metrics, committed = Metrics("demo"), [0]
    metrics.watch_agent(1, lambda: 1, lambda: "10.0.0.2")
    metrics.memory[0] = lambda: WorkAgentMemory(4096, committed[0], 10_000)
    metrics.memory[1] = lambda: WorkAgentMemory(8192, 8192, 0)
    assert scrape(metrics)["llm_serving:kv_cache_committed_bytes", "", "0"] == 0
    committed[0] = 1024
    found = scrape(metrics)
    assert found["llm_serving:kv_cache_reserved_bytes", "", "0"] == 4096
    assert found["llm_serving:kv_cache_committed_bytes", "", "0"] == 1024
    assert found["llm_serving:work_agent_resident_memory_bytes", "", "0"] == 10_000
    assert found["llm_serving:kv_cache_reserved_bytes", "1", "10.0.0.2"] == 8192


def test_state_slots_are_read_at_every_scrape():
    metrics, used = Metrics("demo"), [2]
    metrics.state_slots[0] = lambda: StateSlotUsage(8, used[0], 1)
    assert scrape(metrics)["llm_serving:state_slots_used", "", "0"] == 2
    used[0] = 3
    found = scrape(metrics)
    names = ("state_slots", "state_slots_used", "state_checkpoints")
    assert [found[f"llm_serving:{name}", "", "0"] for name in names] == [8, 3, 1]


def test_metrics_include_the_master_process():
    before = scrape(Metrics("demo"))["process_cpu_seconds_total",]
    assert 0 < before <= time.process_time()


def test_every_metric_names_the_model():
    content, content_type = Metrics('a"b').render()
    lines = [line for line in content.decode().splitlines() if not line.startswith(("#", "process_"))]
    assert all('model_name="a\\"b"' in line for line in lines)
    assert content_type.startswith("text/plain")


def test_load_is_summed_over_replicas():
    metrics = Metrics()
    metrics.record_load(3, 2, 0.5, 70, replica=0)
    metrics.record_load(1, 0, 0.25, 10, replica=1)
    metrics.record_load(4, 1, 0.75, replica=0)
    values = scrape(metrics)
    assert values[("vllm:num_requests_running",)] == 5
    assert values[("vllm:num_requests_waiting",)] == 1
    assert values[("vllm:kv_cache_usage_perc",)] == 0.5
    assert values[("llm_serving:steps_total",)] == 2
    assert values[("vllm:iteration_tokens_total_sum",)] == 80
    assert values[("vllm:iteration_tokens_total_bucket", "16.0")] == 1


def test_finished_request_is_counted_in_token_and_time_histograms():
    metrics = Metrics()
    metrics.record_first_token(0.2)
    for _ in range(4):
        metrics.record_inter_tokens([0.1])
    metrics.record_finished(FinishReason.LENGTH, e2e_s=0.6, ttft_s=0.2, num_prompt=7, num_output=5, queued_s=0.05)
    values = scrape(metrics)
    assert values[("vllm:prompt_tokens_total",)] == 7
    assert values[("vllm:generation_tokens_total",)] == 5
    assert values[("vllm:request_success_total", "length")] == 1
    assert values[("vllm:request_success_total", "stop")] == 0
    assert values[("vllm:time_to_first_token_seconds_bucket", "0.2")] == 1
    assert values[("vllm:time_to_first_token_seconds_bucket", "0.15")] == 0
    assert values[("vllm:inter_token_latency_seconds_count",)] == 4
    assert round(values[("vllm:request_time_per_output_token_seconds_sum",)], 9) == 0.1
    assert values[("vllm:request_queue_time_seconds_sum",)] == 0.05


def test_finished_request_is_counted_in_length_and_phase_histograms():
    metrics = Metrics()
    metrics.record_finished(
        FinishReason.STOP, e2e_s=0.7, ttft_s=0.25, num_prompt=30, num_output=3, queued_s=0.05, decode_s=0.4
    )
    values = scrape(metrics)
    assert values[("vllm:request_prompt_tokens_bucket", "20.0")] == 0
    assert values[("vllm:request_prompt_tokens_bucket", "50.0")] == 1
    assert values[("vllm:request_generation_tokens_sum",)] == 3
    phases = {name: values[(f"vllm:request_{name}_time_seconds_sum",)] for name in ("prefill", "decode", "inference")}
    assert {name: round(seconds, 9) for name, seconds in phases.items()} == {
        "prefill": 0.2,
        "decode": 0.4,
        "inference": 0.6,
    }


def test_request_without_a_token_has_no_phase_metrics():
    metrics = Metrics()
    metrics.record_finished(FinishReason.ABORT, e2e_s=0.7, ttft_s=None, num_prompt=30, num_output=0, queued_s=0.7)
    values = scrape(metrics)
    assert values[("vllm:request_generation_tokens_bucket", "1.0")] == 1
    assert values[("vllm:request_prefill_time_seconds_count",)] == 0
    assert values[("vllm:request_decode_time_seconds_count",)] == 0


def test_metrics_show_the_build_and_the_replicas():
    metrics = Metrics()
    metrics.replicas = lambda: ReplicaCounts(3, 2)
    values = scrape(metrics)
    assert values["llm_serving:build_info", __version__] == 1
    assert values[("llm_serving:replicas",)] == 3
    assert values[("llm_serving:replicas_ready",)] == 2


def test_http_metrics_count_by_route_and_status():
    metrics = Metrics()
    for status in (200, 200, 429):
        metrics.http.answered("POST", "/v1/completions", status)
    values = scrape(metrics)
    assert values["llm_serving:http_requests_total", "/v1/completions", "200", "POST"] == 2
    assert values["llm_serving:http_requests_total", "/v1/completions", "429", "POST"] == 1


def test_swap_metrics_count_blocks_and_sum_the_load_over_replicas():
    metrics = Metrics()
    out = [BlockMove(BlockMoveKind.SWAP_OUT, source, 0, 0, 0, 1) for source in (4, 5)]
    back = BlockMove(BlockMoveKind.SWAP_IN, 0, 6, 0, 0, 1)
    copy = BlockMove(BlockMoveKind.COPY, 1, 2, 0, 0, 1)
    metrics.record_swaps([*out, copy], [Preemption("a", "standard", True), Preemption("b", "standard", False)])
    metrics.record_swaps([back], [])
    metrics.swap_loads[0] = lambda: SwapLoad(1, 2, 8)
    metrics.swap_loads[1] = lambda: SwapLoad(2, 3, 8)
    values = scrape(metrics)
    assert values[("llm_serving:swapped_out_requests_total",)] == 1
    assert values[("llm_serving:swapped_out_blocks_total",)] == 2
    assert values[("llm_serving:swapped_in_blocks_total",)] == 1
    assert values[("vllm:num_requests_swapped",)] == 3
    assert values[("llm_serving:swap_blocks_used",)] == 5
    assert values[("llm_serving:swap_blocks",)] == 16


def test_a_request_with_one_token_has_no_time_per_output_token():
    metrics = Metrics()
    metrics.record_finished(FinishReason.STOP, e2e_s=1.0, ttft_s=1.0, num_prompt=1, num_output=1, queued_s=0.0)
    metrics.record_finished(FinishReason.ABORT, e2e_s=1.0, ttft_s=None, num_prompt=1, num_output=0, queued_s=0.0)
    assert scrape(metrics)[("vllm:request_time_per_output_token_seconds_count",)] == 0


def test_metrics_count_preemptions_cache_hits_violations_audits_and_restarts():
    metrics = Metrics()
    metrics.record_preempted([0, 0, 0])
    metrics.record_finished(
        FinishReason.STOP, e2e_s=1.0, ttft_s=1.0, num_prompt=100, num_output=1, queued_s=0.0, num_cached=60
    )
    metrics.record_bound_violations(1)
    metrics.shares_broken(1, 2)
    metrics.record_audit(differs=True)
    metrics.add(worker_restarts=1)
    values = scrape(metrics)
    assert values[("vllm:num_preemptions_total",)] == 3
    assert values[("vllm:prefix_cache_queries_total",)] == 100
    assert values[("vllm:prefix_cache_hits_total",)] == 60
    assert values[("llm_serving:bound_violations_total",)] == 1
    assert [values["llm_serving:share_violations_total", of] for of in ("tenant_limit", "class_weight")] == [1, 2]
    assert values[("llm_serving:audit_mismatch_total",)] == 1
    assert values[("llm_serving:worker_restarts_total",)] == 1


def test_histogram_counts_a_value_on_a_bound_in_its_bucket():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 99.0):
        histogram.observe(value)
    samples = {s.labels.get("le"): s.value for s in histogram.family("h", "", {}).samples if s.name == "h_bucket"}
    assert samples == {"1.0": 2, "2.0": 4, "+Inf": 5}


def test_draft_tokens_are_counted_by_proposer_under_their_names_and_the_deprecated_ones():
    metrics = Metrics("demo")
    metrics.record_verified_drafts([("ngram", 5, 3), ("forced", 2, 0)])
    metrics.record_verified_drafts([("ngram", 1, 1)])
    values = scrape(metrics)
    assert values["vllm:spec_decode_num_drafts_total",] == 2
    for name, old, counts in (
        ("draft", "checked", {"ngram": 6, "forced": 2, "draft_model": 0, "mtp": 0}),
        ("accepted", "right", {"ngram": 4, "forced": 0, "draft_model": 0, "mtp": 0}),
    ):
        for proposer, count in counts.items():
            assert values[f"vllm:spec_decode_num_{name}_tokens_total", proposer] == count
            assert values[f"llm_serving:guesses_{old}_total", proposer] == count
