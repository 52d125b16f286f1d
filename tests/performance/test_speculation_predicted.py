"""The comparison of predicted and measured speculative decoding: what it reads of a recording, and its report."""

from pathlib import Path
from types import SimpleNamespace

from speculation_predicted import METHODS, Run, predict, show
from support.recordings import record_steps
from support.whatif_loads import create_profile


def test_a_recording_is_simulated_with_and_without_speculation(tmp_path):
    (tmp_path / "a.rec").write_bytes(record_steps(60))  # one token again and again
    (tmp_path / "began").write_text("-1.0")
    found = predict(tmp_path, 1, create_profile(), SimpleNamespace(config=Path("configs/demo_cpu.yaml"), seed=1))
    assert set(found) == set(METHODS)
    assert found["ngram"].num_accepted > 20
    assert found["none"].num_draft_tokens == 0
    assert found["ngram"].figures["tpot_p50_ms"] < found["none"].figures["tpot_p50_ms"]


def test_ratios_of_rounds_are_told_by_their_median_and_their_ends(capsys):
    def rounds(*ratios: float) -> list[dict[str, Run]]:
        without = {"output_tokens_per_s": 100.0, "tpot_p50_ms": 2.0}
        return [
            {
                "ngram": Run({key: ratio * value for key, value in without.items()}, 10, 8),
                "none": Run(without, 0, 0),
            }
            for ratio in ratios
        ]

    show("recitations 1", rounds(2.0, 1.5, 1.8), rounds(1.25, 1.5, 2.0))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| recitations 1 | output_tokens_per_s | 1.50 (1.25-2.00) | 1.80 (1.50-2.00) |"
    assert lines[-1] == "| recitations 1 | accepted_draft_tokens | 8 | 8 |"
