import os
import subprocess
import sys
from pathlib import Path

import pytest
from llm_serving.errors import KernelError
from llm_serving.kernels import library
from support.instruction_sets import real_isas


@pytest.mark.parametrize("isa", real_isas()[:1])
def test_best_instruction_set_is_in_use_without_a_choice(isa: str) -> None:
    isa = os.environ.get("LLM_SERVING_ISA", isa)
    assert library.load().llm_isa().decode() == isa
    with library.use_isa("plain"):
        assert library.load().llm_isa() == b"plain"
    assert library.load().llm_isa().decode() == isa


def test_next_instruction_set_is_used_if_better_kernels_are_unavailable(monkeypatch, caplog) -> None:
    tried = []

    def kernels(isa: str) -> int | None:
        tried.append(isa)
        if isa == "a":
            raise KernelError("no compiler")
        return None if isa == "b" else 7

    monkeypatch.setattr(library, "_kernels", kernels)
    monkeypatch.setattr(library, "preferred_isas", lambda: ["a", "b", "c", "d"])
    assert library._best_kernels() == 7
    assert tried == ["a", "b", "c"]
    assert "kernels for a are not used: no compiler" in caplog.text
    monkeypatch.setattr(library, "preferred_isas", lambda: ["a"])
    with pytest.raises(KernelError, match="no compiler"):
        library._best_kernels()


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
