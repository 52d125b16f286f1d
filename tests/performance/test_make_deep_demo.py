from pathlib import Path

import make_deep_demo
from llm_serving.config import load_config
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.offline import LLM

PROMPTS = ["Count from 5 to 12.", "Which day comes right before Sunday?"]


def test_a_deeper_model_says_what_the_demo_model_says(tmp_path: Path) -> None:
    make_deep_demo.make_deep_demo(tmp_path, num_layers=7, intermediate=704)
    answers = []
    for model in (Path("demo"), tmp_path):
        llm = LLM(load_config(None, ["pa_config.num_blocks=64"], model))
        answers.append([each.text for each in llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24))])
    assert answers[0] == answers[1] and answers[0][0].startswith(" 5, 6, 7")
