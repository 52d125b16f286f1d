import pytest
from benchmarks import engine as benchmark
from harness.figures import Stopwatch
from llm_serving.worker import model_runner
from llm_serving.worker.model_runner import ModelRunner
from support.engine_harness import Harness
from support.factories import create_request


def test_engine_benchmark_times_functions_that_the_loop_calls():
    harness = Harness(ahead=False)
    engine = harness.engine
    engine.executor._runner = ModelRunner
    functions = benchmark._timed_functions(engine)
    engine.executor._runner = harness.runner
    assert [(owner, attribute) for owner, attribute, _ in functions if not hasattr(owner, attribute)] == []
    of_the_loop = [function for function in functions if function[0] not in (ModelRunner, model_runner)]
    assert len(of_the_loop) > 3
    with Stopwatch().on(*of_the_loop):
        engine.submit(create_request(max_tokens=2))
        harness.run()


def test_engine_benchmark_refuses_an_unknown_test(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--model", "demo", "--tests", "A,Q"])
    assert "must be one or more of A, B, C, S, L, separated by commas. Given: A,Q" in capsys.readouterr().err
