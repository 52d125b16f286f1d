import pytest
import yaml
from llm_serving_simulator.tuner.yaml_writer import Edit, edited

SLOTS, POLICY = "model_config.decode_batch_size", "scheduler_config.policy"


def test_edited_key_keeps_its_position_and_comment():
    text = "# mine\nmodel_config:\n    decode_batch_size: 128   # many\n    model_name: m\n\n# the end\n"
    assert edited(text, [Edit(SLOTS, 32, "was 128")]) == (
        "# mine\nmodel_config:\n    # was 128\n    decode_batch_size: 32   # many\n    model_name: m\n\n# the end\n"
    )


def test_yaml_comment_of_any_text_is_one_line():
    text = edited("a: {b: 1}\n", [Edit("a.b", 2, "of x\u2028c: 3\x85d: 4\x1be: 5")])
    assert yaml.safe_load(text) == {"a": {"b": 2}}
    assert text.splitlines() == ["# of x c: 3 d: 4 e: 5", "a: {b: 2}"]


def test_new_key_is_added_at_the_end_of_its_section():
    rest = "\n# next\npa_config:\n  block_size: 16\n"
    text = f"model_config:\n  model_name: m  # mine\n{rest}"
    assert edited(text, [Edit(SLOTS, 32, "new")]) == (
        f"model_config:\n  model_name: m  # mine\n  # new\n  decode_batch_size: 32\n{rest}"
    )


@pytest.mark.parametrize(
    "text",
    [
        "model_config: {model_name: m}\n",
        "model_config: {model_name: m, decode_batch_size: 8}\nscheduler_config: {}\n",
        "model_config:\nscheduler_config:\n",
        "model_config:\n    decode_batch_size:\n        128\npa_config: {block_size: 16}",
        "x: &x {decode_batch_size: 8}\nmodel_config:\n    <<: *x\n    model_name: m\n",
        "x: &n 8\nmodel_config:\n    model_name: m\n",
        "model_config:\n    decode_batch_size:   # not yet\nscheduler_config:\n    order: null\n",
        "{model_config: {model_name: m}}\n",
        "serving_config:\n    agent_ports:\n    - 1\n    - 2\n# end",
        "---\nmodel_config:\n    model_name: 'a: b'\n...\n",
    ],
)
def test_edit_sets_values_in_any_yaml_style_and_keeps_the_rest(text):
    before = yaml.safe_load(text)
    changes = [Edit(SLOTS, 32, "one " * 60), Edit(POLICY, "mixed", "two"), Edit("request_classes.batch.weight", 3, "3")]
    after = yaml.safe_load(edited(text, changes))
    assert after["model_config"].pop("decode_batch_size") == 32
    assert after["scheduler_config"].pop("policy") == "mixed"
    assert after.pop("request_classes") == {"batch": {"weight": 3}}
    (before.get("model_config") or {}).pop("decode_batch_size", None)
    assert {key: value or {} for key, value in after.items()} == {
        key: value or {} for key, value in ({"model_config": {}, "scheduler_config": {}} | before).items()
    }


def test_edit_changes_a_key_under_its_older_name():
    text = "serving_config:\n    batch_waiting_time: 0.5\n"
    assert edited(text, [Edit("model_config.batch_waiting_time", 0.0, "c")]) == (
        "serving_config:\n    # c\n    batch_waiting_time: 0.0\n"
    )
