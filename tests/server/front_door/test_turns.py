"""What many clients want at once, in turns of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

import pytest
from llm_serving.server.front_door import Turns
from llm_serving.server.front_door.turns import NEW_IN_A_ROW, PART, RELEASED_AT_ONCE

BUDGET_S = 0.01


class Clock:
    """Time passes where somebody works."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def work(self, done, name, cost_s=BUDGET_S / 4):
        self.now += cost_s
        done.append(name)


def run(test):
    """Runs a test with turns, a clock and a list of what was done."""

    async def main():
        clock = Clock()
        await test(Turns(asyncio.get_running_loop(), BUDGET_S, clock), clock, [])

    asyncio.run(main())


async def until(done, count):
    while len(done) < count:
        await asyncio.sleep(0)


def test_a_turn_has_so_much_and_what_is_more_waits():
    async def test(turns, clock, done):
        for number in range(10):
            turns.do("a", partial(clock.work, done, number))
        assert done == [0, 1, 2, 3]
        await asyncio.sleep(0)
        assert done == list(range(8))
        await asyncio.sleep(0)
        assert done == list(range(10))
        await asyncio.sleep(0)
        assert turns.has_time

    run(test)


def test_work_in_steps_is_broken_off_after_a_part_of_a_turn():
    async def test(turns, clock, done):
        def step():
            clock.work(done, len(done), 0.6 * PART * BUDGET_S)
            return len(done) < 5

        assert [turns.part(step), len(done)] == [False, 2]
        assert [turns.part(step), len(done)] == [False, 4]
        assert [turns.part(step), len(done)] == [True, 5]
        assert turns.has_time
        done.clear()
        assert not turns.part(step)
        assert not turns.part(step)
        assert not turns.has_time

    run(test)


def test_a_newcomer_waits_for_one_of_each_address_and_not_for_all_of_them():
    async def test(turns, clock, done):
        for number in range(50):
            turns.do("abcde"[number % 5], partial(clock.work, done, "crowd"))
        turns.do("probe", partial(clock.work, done, "probe"))
        await until(done, 51)
        assert done.index("probe") == 4 + 5 + 5 // NEW_IN_A_ROW

    run(test)


def test_of_a_newcomer_every_piece_goes_before_a_crowd_that_waits_on():
    async def test(turns, clock, done):
        for number in range(200):
            turns.do("abcde"[number % 5], partial(clock.work, done, "crowd"))
        await until(done, 40)
        for count in range(1, 4):
            before = len(done)
            turns.do("probe", partial(clock.work, done, "probe"))
            while done.count("probe") < count:
                await asyncio.sleep(0)
            assert done[before:].index("probe") <= 5 if count > 1 else done[before] == "probe"

    run(test)


def test_newcomers_without_end_leave_a_share_to_those_who_wait():
    async def test(turns, clock, done):
        for _ in range(30):
            turns.do("old", partial(clock.work, done, "old"))
        await until(done, 8)
        for number in range(400):
            turns.do(f"new {number}", partial(clock.work, done, "new"))
            turns.do(f"newer {number}", partial(clock.work, done, "new"))
            await asyncio.sleep(0)
            if done.count("old") == 30:
                break
        assert len(done) <= 8 + 22 * (NEW_IN_A_ROW + 1) + 4
        assert len(turns._old) <= len(done)
        await until(done, 30 + 2 * (number + 1))
        await asyncio.sleep(0)
        assert not turns._old, "nobody is remembered"

    run(test)


def test_nobody_passes_those_who_wait():
    async def test(turns, clock, done):
        for number in range(6):
            turns.do("a", partial(clock.work, done, number))
        await asyncio.sleep(0)
        assert not turns.has_time or len(done) == 6
        for number in range(6, 12):
            turns.do("a", partial(clock.work, done, number))
        await until(done, 12)
        assert done == list(range(12))

    run(test)


def test_work_within_work_counts_once():
    async def test(turns, clock, done):
        turns.do("a", lambda: turns.do("a", partial(clock.work, done, "inner", 0.6 * BUDGET_S)))
        assert turns.has_time

    run(test)


def test_work_may_count_for_what_follows_from_it():
    async def test(turns, clock, done):
        def begin_much():
            turns.weigh(5.0)
            clock.work(done, "much")

        for _ in range(3):
            turns.do("a", begin_much)
        assert done == ["much"], "a quarter of a turn, and all that follows"
        await asyncio.sleep(0)
        assert len(done) == 2
        await until(done, 3)
        await asyncio.sleep(0)
        turns.do("a", partial(clock.work, done, "little"))
        assert turns.has_time, "it holds for that work alone"

    run(test)


def test_work_that_fails_is_told_and_stops_nobody():
    async def test(turns, clock, done):
        told = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
        clock_out = partial(clock.work, done, "first", BUDGET_S)
        turns.do("a", clock_out)
        turns.do("a", lambda: 1 / 0)
        turns.do("a", partial(clock.work, done, "after"))
        await until(done, 2)
        assert [type(error) for error in told] == [ZeroDivisionError]

    run(test)


class TestPacedApplications:
    def test_a_few_begin_in_one_turn_however_many_were_asked(self):
        async def test(turns, clock, done):
            async def app(scope, receive, send):
                clock.work(done, scope, BUDGET_S / 4)

            tasks = [asyncio.create_task(turns.paced(app, "a")(number, None, None)) for number in range(100)]
            most = 0
            while len(done) < 100:
                before = len(done)
                await asyncio.sleep(0)
                most = max(most, len(done) - before)
            assert most <= 12
            assert done == list(range(100))
            await asyncio.gather(*tasks)

        run(test)

    def test_of_those_that_take_long_fewer_go_on_at_once(self):
        """Those let go take their time after the turn's own work, all of them before anybody else is served."""

        async def test(turns, clock, done):
            async def app(scope, receive, send):
                clock.work(done, scope, 0.8 * BUDGET_S)

            tasks = [asyncio.create_task(turns.paced(app, "a")(number, None, None)) for number in range(40)]
            counts = []
            while len(done) < 40:
                before = len(done)
                await asyncio.sleep(0)
                counts.append(len(done) - before)
            assert max(counts) <= 4
            await asyncio.gather(*tasks)

        run(test)

    def test_of_those_that_are_short_again_more_do(self):
        async def test(turns, clock, done):
            async def app(cost_s, receive, send):
                clock.work(done, cost_s, cost_s)

            costs = [0.8 * BUDGET_S] * 10 + [0.01 * BUDGET_S] * 100
            tasks = [asyncio.create_task(turns.paced(app, "a")(cost_s, None, None)) for cost_s in costs]
            most = 0
            while len(done) < len(costs):
                before = len(done)
                await asyncio.sleep(0)
                most = max(most, len(done) - before) if before > 60 else 0
            assert most == RELEASED_AT_ONCE
            await asyncio.gather(*tasks)

        run(test)

    def test_every_step_waits_for_its_turn(self):
        async def test(turns, clock, done):
            async def app(scope, receive, send):
                await asyncio.sleep(0)
                done.append("second step")

            task = asyncio.create_task(turns.paced(app, "a")(None, None, None))
            await asyncio.sleep(0)
            turns.do("b", partial(clock.work, done, "others", BUDGET_S))
            turns.do("b", partial(clock.work, done, "others", BUDGET_S))
            await task
            assert done[-1] == "second step"
            assert done.count("others") == 2

        run(test)

    @pytest.mark.parametrize("waits", [False, True])
    def test_a_timeout_ends_what_it_is_around(self, waits):
        async def test(turns, clock, done):
            async def app(scope, receive, send):
                try:
                    async with asyncio.timeout(0.001):
                        await asyncio.Event().wait()
                except TimeoutError:
                    done.append("late")
                await asyncio.sleep(0)
                done.append("answered")

            task = asyncio.create_task(turns.paced(app, "a")(None, None, None))
            while not task.done():
                if waits:
                    clock.now += BUDGET_S
                    turns.do("b", partial(clock.work, [], "others", BUDGET_S))
                await asyncio.sleep(0)
            assert done == ["late", "answered"]

        run(test)

    def test_who_is_cancelled_while_it_waits_may_clean_up(self):
        async def test(turns, clock, done):
            async def app(scope, receive, send):
                try:
                    await asyncio.sleep(0)
                    done.append("never")
                finally:
                    done.append("cleaned up")

            task = asyncio.create_task(turns.paced(app, "a")(None, None, None))
            await asyncio.sleep(0)
            for _ in range(5):
                turns.do("b", partial(clock.work, [], "others", BUDGET_S))
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert done == ["cleaned up"]
            assert task.cancelled()

        run(test)

    def test_what_it_raises_is_raised(self):
        async def test(turns, clock, done):
            async def app(scope, receive, send):
                await asyncio.sleep(0)
                raise ValueError("no")

            with pytest.raises(ValueError, match="no"):
                await turns.paced(app, "a")(None, None, None)

        run(test)
