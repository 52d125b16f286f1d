import numpy as np
import pytest
from families import adapters
from llm_serving.core.enums import QuantizationName
from llm_serving.errors import ModelError, WorkerError
from llm_serving.formats.peft import fingerprint, number_of, read_adapter
from llm_serving.models.spec import ModelSpec
from llm_serving.network.adapters import AdapterLimits, check_adapter, experts_modules
from llm_serving.network.quantization import Quantization
from llm_serving.worker.model_runner import ModelRunner
from support.adapter_factories import merged, write_adapter
from support.family_configs import config_of
from support.graph_model import backend
from support.model_factories import tiny_spec, write_model, write_safetensors
from support.step_factories import step_input

pytestmark = pytest.mark.mindspore

SPEC = tiny_spec()
PROMPT = np.random.default_rng(7).integers(0, 97, 21).tolist()
LIMITS = AdapterLimits(3, 8)
SIZES = {"num_blocks": 32, "block_size": 16, "max_model_len": 64}


def runner_of(folder, dtype="float32", spec=SPEC, limits=LIMITS, **options):
    return ModelRunner(spec, folder, backend("cpu", dtype), **SIZES, adapters=limits, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of the base model, of two adapters, and of the models with each adapter merged."""
    root = tmp_path_factory.mktemp("adapters")
    weights = write_model(root / "base", SPEC)
    for number, options in ((1, {}), (2, {"targets": ("q_proj", "up_proj"), "rank": 8, "use_rslora": True, "seed": 5})):
        changes = write_adapter(root / f"adapter{number}", SPEC, **options)
        (root / f"merged{number}").mkdir()
        write_safetensors(root / f"merged{number}" / "model.safetensors", merged(weights, changes))
    return root


def logits_of(runner, adapter=None, step=0):
    """Return log-probabilities of all tokens after each token of the prompt."""
    scores = [(0, token, list(range(97)), 0) for token in range(len(PROMPT))]
    adapters = [] if adapter is None else [adapter]
    given = step_input([(PROMPT, 0, [3, 4])], step=step, scores=scores, samples=[], adapters=adapters)
    return runner.execute(given).scores.logprobs.reshape(len(PROMPT), -1)


@pytest.mark.parametrize(("kernels", "dtype", "atol"), [("program", "float32", 1e-4), ("primitives", "float16", 0.03)])
def test_an_adapter_computes_what_merged_weights_do(folders, kernels, dtype, atol):
    """The logits without adapters are those of programs, which compute the bits of primitives and compile sooner."""
    runner = runner_of(folders / "base", dtype, as_program=kernels == "program")
    base = logits_of(runner_of(folders / "base", dtype, limits=None))
    for number in (1, 2):
        runner.adapters.read(number, folders / f"adapter{number}")
    runner.warm_up()
    for number in (1, 2):
        changed = logits_of(runner, (number, 2), step=3 * number - 3)
        expected = logits_of(runner_of(folders / f"merged{number}", dtype, limits=None))
        np.testing.assert_allclose(changed, expected, atol=atol)
        assert np.abs(changed - base).max() > 0.1
        np.testing.assert_array_equal(logits_of(runner, step=3 * number - 2), base)
        np.testing.assert_array_equal(logits_of(runner, (number, 0), step=3 * number - 1), changed)


@pytest.mark.parametrize(
    ("kernels", "dtype"), [("program", "float32"), ("program", "bfloat16"), ("primitives", "bfloat16")]
)
def test_rows_of_a_mixed_step_have_the_bits_of_the_request_alone(folders, dtype, kernels):
    runner = runner_of(folders / "base", dtype, as_program=kernels == "program")
    for number in (1, 2):
        runner.adapters.read(number, folders / f"adapter{number}")
    prompts = [PROMPT[first : first + 9] for first in (0, 3, 5, 8, 10, 11)]
    adapters = [(1, 0), (0, 0), (2, 1), (1, 0), (2, 1), (0, 0)]
    rows = [(prompt, 0, [1 + index]) for index, prompt in enumerate(prompts)]
    scored = [(row, 8, list(range(97)), 0) for row in range(len(rows))]
    given = step_input(rows, scores=scored, samples=[], adapters=adapters)
    together = runner.execute(given).scores.logprobs.reshape(len(rows), -1)
    for index, (row, adapter) in enumerate(zip(rows, adapters, strict=True)):
        score = [(0, 8, list(range(97)), 0)]
        alone = step_input([row], step=1 + index, scores=score, samples=[], adapters=[adapter])
        np.testing.assert_array_equal(runner.execute(alone).scores.logprobs, together[index])


def test_refusals_name_the_field_the_rule_and_the_value(folders, tmp_path):
    runner = runner_of(folders / "base")
    for fields, reason in (
        ({"use_dora": True}, "`use_dora` must be false.*Given: True"),
        ({"modules_to_save": ["lm_head"]}, "`modules_to_save` must be null.*lm_head"),
        ({"bias": "all"}, "`bias` must be none.*Given: .all"),
        ({"fan_in_fan_out": True}, "`fan_in_fan_out` must be false"),
        ({"peft_type": "IA3"}, "`peft_type` must be LORA. Given: .IA3"),
        ({"r": 512}, "`r` must be an integer from 1 to 256. Given: 512"),
        ({"rank": 16}, "`r` must be at most 8 .lora_config.max_lora_rank.. Given: 16"),
        ({"targets": ("q_proj", "lm_head")}, "no linear layer lm_head"),
    ):
        write_adapter(tmp_path / "bad", SPEC, **fields)
        with pytest.raises(ModelError, match=reason):
            runner.adapters.read(1, tmp_path / "bad")


def test_a_step_that_names_an_unknown_adapter_fails_alone(folders):
    runner = runner_of(folders / "base")
    with pytest.raises(WorkerError, match="adapter 9 is not in host memory"):
        logits_of(runner, (9, 0))
    logits_of(runner, step=1)


def test_changed_files_are_not_served_under_the_number_of_the_former_ones(folders, tmp_path):
    write_adapter(tmp_path, SPEC)
    number = number_of(fingerprint(tmp_path))
    runner = runner_of(folders / "base")
    runner.adapters.set(number, str(tmp_path))
    logits_of(runner, (number, 0))
    write_adapter(tmp_path, SPEC, seed=8)
    again = runner_of(folders / "base")
    again.adapters.set(number, str(tmp_path))
    with pytest.raises(WorkerError, match="has changed since the adapter was loaded"):
        logits_of(again, (number, 0))


@pytest.mark.parametrize("changes", [{"head_dim": 20, "intermediate_size": 90}, {"attention_bias": True}])
def test_odd_sizes_and_biases_change_nothing_of_the_rule(tmp_path, changes):
    spec = tiny_spec(**changes)
    weights = write_model(tmp_path / "base", spec)
    write_safetensors(
        tmp_path / "merged.safetensors", merged(weights, write_adapter(tmp_path / "adapter", spec, rank=5))
    )
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged.safetensors").rename(tmp_path / "merged" / "model.safetensors")
    expected = logits_of(runner_of(tmp_path / "merged", spec=spec, limits=None))
    runner = runner_of(tmp_path / "base", spec=spec)
    runner.adapters.read(1, tmp_path / "adapter")
    np.testing.assert_allclose(logits_of(runner, (1, 1)), expected, atol=1e-4)


def test_adapters_of_quantized_weights_change_the_answer_and_keep_rows_apart(folders):
    quantization = Quantization(QuantizationName.W8A16)
    plain = logits_of(runner_of(folders / "base", "bfloat16", limits=None, quantization=quantization))
    runner = runner_of(folders / "base", "bfloat16", quantization=quantization)
    runner.adapters.read(1, folders / "adapter1")
    changed = logits_of(runner, (1, 0))
    assert np.abs(changed - plain).max() > 0.1
    np.testing.assert_array_equal(logits_of(runner, step=1), plain)


@pytest.mark.parametrize("name", adapters.CASES)
def test_an_adapter_computes_what_peft_does(tmp_path, name):
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    model.mkdir()
    adapter.mkdir()
    adapters.write(adapters.CASES[name], model, adapter)
    with np.load(adapters.GOLDEN) as golden:
        expected = golden[name]
    runner = runner_of(model, spec=ModelSpec.from_folder(model), limits=AdapterLimits(2, 16))
    runner.adapters.read(1, adapter)
    size = expected.shape[1]
    scores = [(0, token, list(range(size)), 0) for token in range(len(expected))]
    given = step_input([(list(adapters.PROMPT), 0, [3])], scores=scores, samples=[], adapters=[(1, 1)])
    np.testing.assert_allclose(runner.execute(given).scores.logprobs.reshape(-1, size), expected, atol=1e-4)


def test_experts_are_refused_by_name(tmp_path):
    spec = ModelSpec.from_hugging_face(config_of("qwen3, experts"))
    write_adapter(tmp_path, spec, targets=("q_proj", "down_proj"))
    _, linears = spec.with_adapters(2, 8, as_program=True)
    with pytest.raises(
        ModelError, match=r"adapters of experts and routers are not supported. Found: .*experts.*down_proj"
    ):
        check_adapter(read_adapter(tmp_path), linears, experts_modules(spec.network), 8)
