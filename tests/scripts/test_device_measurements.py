"""What the acceptance of a device measures: small models, right answers, long contexts and the time of a step."""

import dataclasses
import json

import numpy as np
import pytest
from acceptance.device import answers, long_context, small_models, step_time
from acceptance.device.run import is_contest_model
from acceptance.device.server import Answer
from acceptance.device.step_time import Device, device_of, limit_s, step_s
from families import models
from llm_serving.config import load_config
from llm_serving.config.paths import DEMO_FOLDER
from llm_serving.models.spec import ModelSpec
from llm_serving.network.quantization import unsupported_by_ascend

DEMO = ModelSpec.from_folder(DEMO_FOLDER)
DEVICE = Device("of the test", 100e9, 10e12)


class FakeServer:
    url = "http://127.0.0.1:9"

    def longest(self):
        return 1000


def answer(text="", token_ids=(), logprobs=(), arrivals=()):
    return Answer(text, tuple(token_ids), tuple(logprobs), tuple(arrivals))


class TestSmallModels:
    @pytest.mark.parametrize("name", models.names())
    def test_every_family_has_a_form_that_ascend_accepts(self, name, tmp_path):
        config = small_models.device_config(models.model(name).config)
        spec = ModelSpec.from_hugging_face(config)
        if unsupported_by_ascend(spec.network, spec.max_position_embeddings) is not None:
            return  # refused whatever the size of its heads
        (tmp_path / "config.json").write_text(json.dumps(config))
        length = models.model(name).served_length
        served = [] if length is None else [f"model_config.max_generate_length={length}"]
        served_config = load_config(None, ["device_config.device_target=Ascend", *served], tmp_path)
        scaled = config.get("rope_scaling") or config.get("rope_parameters")
        assert served_config.model.max_generate_length == (length or (256 if scaled else small_models.LONGEST))

    def test_small_model_requests_fit_into_the_cache(self):
        assert small_models.NUM_BLOCKS >= small_models.LONGEST // small_models.BLOCK_SIZE + 2


class TestRightAnswers:
    def questions(self):
        return json.loads((DEMO_FOLDER / "questions.json").read_text())

    def ask(self, num_wrong):
        wrong = {each["instruction"] + each["input"] for each in self.questions()[:num_wrong]}
        known = {f"{each['instruction']} {each['input']}".strip(): each for each in self.questions()}

        def ask(url, bodies):
            found = [known[body["prompt"]] for body in bodies]
            return [
                answer("?" if each["instruction"] + each["input"] in wrong else f" {each['output']}\n")
                for each in found
            ]

        return ask

    def test_acceptance_asks_all_held_out_questions(self):
        found = answers.right(FakeServer(), self.ask(0))
        assert found.verdict == "passed"
        assert found.lines[0].startswith("408 of 408 held-out questions, 48 at once")
        assert "| addition | 28 | 28 |" in found.lines

    def test_too_many_wrong_answers_are_a_fault(self):
        found = answers.right(FakeServer(), self.ask(20))
        assert found.faults[0].startswith("only 95.1% of the answers are right, 97% are needed")
        assert found.faults[1].endswith(": '?'")


class TestLongContext:
    def ask(self, off):
        asked = []

        def ask(url, bodies):
            asked.extend(len(body["prompt"]) for body in bodies)
            if bodies[0]["max_tokens"] > 1:
                return [answer(token_ids=range(8), logprobs=[-1.0] * 8)]
            return [answer(token_ids=[at + 1], logprobs=[-1.0 + off]) for at in range(len(bodies))]

        return ask, asked

    def test_long_context_prompts_reach_the_limit(self):
        ask, asked = self.ask(0.05)
        found = long_context.examine(FakeServer(), "float16", 2048, ask)
        assert (found.verdict, max(asked)) == ("passed", 998)
        assert "| 991 | 0.050 | 7 of 7 |" in found.lines

    @pytest.mark.parametrize("off", [0.3, float("nan")])
    def test_long_context_reports_different_logprobs_by_decoding(self, off):
        found = long_context.examine(FakeServer(), "float16", 2048, self.ask(off)[0])
        assert len(found.faults) == 3
        assert found.faults[-1].startswith("991 tokens: log-probabilities of decode steps and of prompts differ by")
        verdict = long_context.examine(FakeServer(), "bfloat16", 2048, self.ask(off)[0]).verdict
        assert verdict == ("passed" if off == 0.3 else "FAILED")


class TestStepTime:
    def test_step_limit_is_the_slower_of_memory_and_arithmetic(self):
        config = load_config(None, [], "demo")
        weights = 2 * DEMO.num_weight_elements
        one = limit_s(DEMO, config, DEVICE, 1, 0, 1)
        assert one == pytest.approx(0.03 + 3 * weights / 100e9, rel=1e-3)
        many = limit_s(DEMO, config, DEVICE, 1, 0, 100_000)
        assert many == pytest.approx(0.03 + 3 * weights * 100_000 / 10e12, rel=1e-3)
        cache = limit_s(DEMO, config, DEVICE, 32, 2048, 32) - limit_s(DEMO, config, DEVICE, 32, 0, 32)
        assert cache == pytest.approx(3 * 32 * 2048 * DEMO.kv_bytes_per_token(2) / 100e9)
        ranks = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, tensor_parallel=2))
        assert limit_s(DEMO, ranks, DEVICE, 1, 0, 1) - 0.03 == pytest.approx((one - 0.03) / 2)

    def test_step_limit_of_the_contest_is_twice_its_published_step(self):
        llama = ModelSpec.from_hugging_face(
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 4096,
                "intermediate_size": 11008,
                "num_attention_heads": 32,
                "num_hidden_layers": 32,
                "vocab_size": 32000,
                "max_position_embeddings": 4096,
            }
        )
        assert is_contest_model(llama)
        assert not is_contest_model(DEMO)
        published = 0.0267
        allowed = limit_s(llama, load_config(None, [], "demo"), device_of("910B4"), 1, 96, 1)
        assert 2.5 * published < allowed < 3.5 * published

    def test_device_limits_are_selected_by_name(self):
        assert device_of("| 0  910B3 | OK |").bandwidth == 1600e9
        assert device_of("| 0  Ascend910_9392 |").name == "910_93"
        unknown = device_of("| 0  X9 |")
        assert (unknown.name, unknown.bandwidth) == ("unknown, as the slowest known one", 800e9)

    def test_step_time_counts_events_in_which_all_requests_decode(self):
        first = answer(arrivals=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        second = answer(arrivals=[2.0, 3.0, 4.0, 5.0])
        assert step_s([first]) == pytest.approx(1.0)
        assert step_s([first, second]) == pytest.approx(1.0)
        assert step_s([answer(arrivals=[1.0, 2.0, 2.0, 2.0, 3.0])]) == pytest.approx(1.0), "accepted draft tokens"
        assert step_s([first, answer(arrivals=[7.0, 8.0])]) == float("inf")

    def test_step_time_of_each_kind_has_a_limit(self):
        config = load_config(None, [], "demo")

        def ask(url, bodies):
            seconds = 0.5 if len(bodies) > 1 else 0.01
            return [answer(arrivals=np.arange(1, body["max_tokens"] + 1) * seconds) for body in bodies]

        found = step_time.examine(FakeServer(), DEMO, config, DEVICE, ask)
        assert len(found.faults) == 1
        assert found.faults[0].startswith("decode, 32 requests: a step takes 500.0 ms; 30.")
        assert any(line.startswith("| prompt of 500 tokens | 10.00 |") for line in found.lines)
