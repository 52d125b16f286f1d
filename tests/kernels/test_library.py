import subprocess
import sys
from pathlib import Path

import pytest
from llm_serving.errors import KernelError
from llm_serving.kernels import library
from support.instruction_sets import real_isas


def test_supported_isas_are_those_that_the_tests_use() -> None:
    assert real_isas() == library.supported_isas()


def test_isa_in_use_lists_the_known_sets_for_an_unknown_one() -> None:
    with pytest.raises(KernelError, match=r"must be one of .*plain\. Given: sse9"), library.use_isa("sse9"):
        pass


@pytest.mark.parametrize("isa", ["plain"])
def test_environment_selects_instruction_set_and_threads(isa: str) -> None:
    program = "from llm_serving.kernels import library; k = library.load(); print(k.llm_isa(), k.llm_num_threads())"
    finished = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {program}"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"LLM_SERVING_ISA": isa, "LLM_SERVING_THREADS": "3", "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
    )
    assert finished.stdout.split() == [str(isa.encode()), "3"], finished.stderr
