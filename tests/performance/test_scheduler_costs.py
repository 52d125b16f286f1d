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
