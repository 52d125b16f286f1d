from hypothesis import given
from hypothesis import strategies as st
from llm_serving.engine.recovery import find_culprits


@given(st.integers(1, 200), st.sets(st.integers(0, 199), max_size=4))
def test_find_culprits_returns_exactly_the_culprits(count: int, bad: set[int]) -> None:
    trials = []

    def passes(group: list[int]) -> bool:
        trials.append(group)
        return not bad & set(group)

    guilty = sorted(bad & set(range(count)))
    assert find_culprits(range(count), passes) == guilty
    assert len(trials) <= 1 + 2 * len(guilty) * count.bit_length()


def test_find_culprits_returns_none_for_a_failure_of_a_combination() -> None:
    assert find_culprits([1, 2, 3, 4], lambda group: not {1, 4} <= set(group)) == []
