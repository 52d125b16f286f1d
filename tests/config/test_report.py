"""`describe` prints YAML that loads to the same configuration."""

import dataclasses

import pytest
from llm_serving.config import load_config
from llm_serving.config.paths import PROJECT_FOLDER
from llm_serving.config.report import describe

LEGACY = PROJECT_FOLDER / "configs" / "llama" / "llama_7b_kbk_pa_dyn.yaml"


def test_printed_configuration_loads_to_the_same_values(tmp_path):
    overrides = [
        "serving_config.agent_ports=[1, 2]",
        'device_config.graph_kernel_flags="it\'s"',
        "scheduler_config.swap_block_cost_tokens=0.00001",
        "request_classes.batch.tpot_slo_s=1000000000000000000",
        f"api_keys.123.key_sha256={'0a' * 32}",
    ]
    config = load_config(LEGACY, overrides)
    assert printed_and_loaded(config, tmp_path) == plain(config)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model_config.model_aliases=['*']", "serving_config.cors_origins=['null', 'http://[::1]:8080']"],
        ["model_config.model_aliases=[]", "serving_config.allowed_hosts=['::1', '0x10', '1:30']"],
        [r'device_config.graph_kernel_flags="a\nb\t\u2028 c: # \u00e9"'],
    ],
)
def test_ambiguous_texts_are_quoted(overrides, tmp_path):
    config = load_config(None, overrides)
    assert printed_and_loaded(config, tmp_path) == plain(config)


def printed_and_loaded(config, folder):
    path = folder / "printed.yaml"
    path.write_text(describe(config))
    return plain(load_config(path))


def plain(config):
    """Return the configuration without sources, notices and origin."""
    return dataclasses.replace(config, sources={}, notices=(), origin=None)


def test_each_value_has_its_source():
    lines = describe(load_config(LEGACY, ["serving_config.server_port=9000"])).splitlines()
    assert ["server_port: 9000", "--set"] in [[part.strip() for part in line.split("  # ")] for line in lines]
    assert [line for line in lines if line.startswith("    vocab_size: 32000 ") and line.endswith(".yaml:8")]
    assert [line for line in lines if line.startswith("    policy: 'prefill_first' ") and line.endswith("# default")]
    assert "# notices:" in lines


def test_printed_adapters_load_to_the_same_folders(tmp_path):
    for name in ("a", "b'c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["q_proj"]}')
    yaml = tmp_path / "given.yaml"
    yaml.write_text(f'lora_config:\n  lora_modules: {{x/1: {tmp_path}/a, y: "{tmp_path}/b\'c"}}\n')
    config = load_config(yaml)
    assert printed_and_loaded(config, tmp_path) == plain(config)
