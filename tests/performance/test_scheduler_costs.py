from pathlib import Path

from benchmarks import scheduler
from llm_serving.config import load_config


def test_scheduler_costs_time_each_part_of_a_step(tmp_path):
    settings = ["model_config.decode_batch_size=4", "model_config.max_generate_length=1280"]
    settings += ["serving_config.audit_every=0", f"scheduler_config.record_path={tmp_path}"]
    config = load_config(None, settings, Path("demo"))
    figures = scheduler.step_parts(config, num_blocks=400, num_waiting=4, num_steps=3)
    parts = {each.quantity.removesuffix(", median") for each in figures if each.quantity.endswith(", median")}
    assert {"scheduling", "building the step", "text and pieces", "recorder", "the rest of the loop"} <= parts
    assert all(each.value > 0 for each in figures)


def test_scheduler_costs_time_each_part_of_the_start_of_a_request():
    settings = ["model_config.decode_batch_size=2", "model_config.max_generate_length=1280"]
    config = load_config(None, [*settings, "serving_config.audit_every=0"], Path("demo"))
    figures = scheduler.request_parts(config, num_blocks=400, num_streams=2, repeats=3)
    values = {each.quantity.removeprefix("request of one token: "): each.value for each in figures}
    parts = (
        "decoding and checking the body",
        "tokenizing and admission",
        "adding to the scheduler's queue",
        "scheduling",
    )
    assert all(values[part] > 0 for part in parts)
    assert values["from the complete body to the schedule"] < values["the whole"]
