"""A deadline that runs out waits for the turn of its address."""

import asyncio
from collections.abc import Callable

from llm_serving.server.front_door.turn_timer import TurnTimer
from llm_serving.server.front_door.turns import Turns


def run(play: Callable[[TurnTimer, Turns, list[str]], None]) -> list[str]:
    """What was late, after `play` and some turns of the loop."""
    late: list[str] = []

    async def inside() -> None:
        loop = asyncio.get_running_loop()
        turns = Turns(loop)
        play(TurnTimer(loop, turns, "here"), turns, late)
        done = loop.create_future()
        loop.call_later(0.001, turns.do_later, "here", lambda: done.set_result(None))
        await done

    asyncio.run(inside())
    return late


def test_who_is_late_is_dealt_with_once():
    assert run(lambda timer, turns, late: timer.start(0, lambda: late.append("late"))) == ["late"]


def test_nobody_is_late_after_the_stop():
    def play(timer: TurnTimer, turns: Turns, late: list[str]) -> None:
        timer.start(0, lambda: late.append("late"))
        timer.stop()
        assert not timer.is_set

    assert run(play) == []


def test_a_stop_while_it_waits_for_its_turn_counts():
    def play(timer: TurnTimer, turns: Turns, late: list[str]) -> None:
        turns.do_later("here", timer.stop)  # before it, and what comes after that has to wait
        timer.start(0, lambda: late.append("late"))
        timer._run_out(lambda: late.append("late"))
        assert timer.is_set

    assert run(play) == []
