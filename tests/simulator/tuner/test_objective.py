import pytest
from llm_serving.errors import ConfigError
from llm_serving_simulator.tuner.problem import Figure, FigureConstraint, parse_constraint, read_objective

GOAL = """\
constraints:
    interactive.ttft_p99_ms: 500
    tenant alice.goodput_share: 0.9
most: output_tokens
fixed: [scheduler_config.policy]
"""
KEPT = {"interactive.ttft_p99_ms": 400.0, "tenant alice.goodput_share": 1.0, "output_tokens_per_s": 100.0}


@pytest.fixture
def goal(tmp_path):
    (tmp_path / "goal.yaml").write_text(GOAL)
    return read_objective(tmp_path / "goal.yaml")


def test_objective_describes_itself(goal):
    assert str(goal) == "interactive.ttft_p99_ms <= 500; tenant alice.goodput_share >= 90.0%; most output_tokens_per_s"
    assert goal.fixed == ("scheduler_config.policy",)


def test_objective_ranks_constraints_before_the_figure(goal):
    better = KEPT | {"output_tokens_per_s": 200.0}
    assert goal.score(KEPT, KEPT) == 0.5 < goal.score(better, KEPT) < 1
    broken = better | {"interactive.ttft_p99_ms": 900.0}
    assert goal.score(broken, KEPT) == pytest.approx(-(900 - 450) / 450)
    assert goal.score({"output_tokens_per_s": 200.0}, KEPT) == -2  # no figure was measured


def test_objective_margin_applies_to_each_kind_of_limit():
    aims = [
        FigureConstraint(Figure("", name), limit, 0.1).target
        for name, limit in (("ttft_p99_ms", 500), ("goodput_share", 0.9), ("output_tokens_per_s", 100), ("refused", 0))
    ]
    assert aims == pytest.approx([450, 0.91, 110, 0])


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        (
            "ttft_p99_ms: 500",
            "ttft_p99: 500",
            r"goal.yaml:2: `constraints.interactive.ttft_p99` must be FIGURE.*nearest",
        ),
        ("500", "fast", r"goal.yaml:2: `constraints.interactive.ttft_p99_ms` must be a number >= 0. Given: 'fast'"),
        ("most: output_tokens\n", "", "must have either `most` or `least`"),
        ("most: output_tokens", "most: latency", r"goal.yaml:4: `most` must be .* say `least: latency`"),
        ("most: output_tokens", "most: output_token", r"goal.yaml:4: `most` must be FIGURE.*`output_tokens`"),
        ("fixed: [", "fix: [", r"goal.yaml:5: unknown key `fix`; the nearest known one is `fixed`"),
        ("fixed: [scheduler_config.policy]", "margin: 2", r"goal.yaml:5: `margin` must be a number of at least 0"),
    ],
)
def test_invalid_objective_error_has_a_line(tmp_path, before, after, error):
    (tmp_path / "goal.yaml").write_text(GOAL.replace(before, after, 1))
    with pytest.raises(ConfigError, match=error):
        read_objective(tmp_path / "goal.yaml")


def test_objective_error_names_an_unknown_class_or_tenant_with_its_line(goal):
    goal.check_groups(["interactive"], ["alice", "bob"])
    with pytest.raises(ConfigError, match=r"goal.yaml:3: `tenant alice.goodput_share` .*: interactive, tenant bob"):
        goal.check_groups(["interactive"], ["bob"])


def test_objective_accepts_an_old_figure_name_with_a_log_line(caplog):
    assert parse_constraint("guesses_right=5", "--need").figure.key == "accepted_draft_tokens"
    assert "guesses_right is renamed to accepted_draft_tokens" in caplog.text
