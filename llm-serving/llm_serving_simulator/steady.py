"""Steps that are all alike, decided without a look at each request: for simulations, where most steps are.

Every request runs and decodes, nobody waits, and nobody ends. Then the next step has the rows of the one before, each
one token further; what else `schedule` and `update` do is the same for every row, or falls to a row when it fills a
block. Requests themselves are brought up to date when somebody looks at them (`settle`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from llm_serving.core.request import Request
from llm_serving.scheduler.orders import OUTPUT_TOKEN_WEIGHT
from llm_serving.scheduler.policies import Load
from llm_serving.scheduler.schedule import Schedule, ScheduledRow
from llm_serving.scheduler.scheduler import Scheduler

TokensAt = Callable[[Request, int, int], list[int]]
"""The tokens that a request gets at places [start, end) among its tokens."""


class SteadySteps:
    """What `schedule` and `update` of a scheduler would do, as long as steps are alike.

    Between calls the scheduler is as they would have left it, but for its running requests, and all of it once these
    are settled.

    Args:
        scheduler: Of which `are_alike` is true.
        num_in_flight: Steps that have been formed and not been replied to: none or one.
        num_steps: That may be formed before a request ends.
        tokens_at: What the device chooses.
    """

    def __init__(self, scheduler: Scheduler, num_in_flight: int, num_steps: int, tokens_at: TokensAt) -> None:
        self.num_formed = self.num_replied = 0
        self._settled = 0, 0
        """Both, when all were settled."""
        self._scheduler, self._num_in_flight, self._num_steps = scheduler, num_in_flight, num_steps
        self._tokens_at = tokens_at
        self.rows = list(scheduler.running)
        self.num_keys = sum([each.num_computed_tokens for each in self.rows]) + len(self.rows)
        """That the next step reads."""
        self._first_step = scheduler.num_steps
        self._starts = {each: (each.num_computed_tokens, len(each.output_token_ids)) for each in self.rows}
        block_size = scheduler.blocks.block_size
        self._growing: dict[int, list[Request]] = defaultdict(list)
        """By the number of the step, modulo the size of blocks: who needs a block for it."""
        self._filling: dict[int, list[Request]] = defaultdict(list)
        """By the number of the reply: who has filled one with it."""
        self._charges: dict[tuple[str, str], int] = defaultdict(int)
        self._tokens: dict[str, int] = defaultdict(int)
        for each in self.rows:
            self._growing[-each.num_computed_tokens % block_size].append(each)
            self._filling[(num_in_flight - 1 - each.num_computed_tokens) % block_size].append(each)
            self._charges[each.request_class.name, each.tenant] += OUTPUT_TOKEN_WEIGHT
            self._tokens[each.request_class.name] += OUTPUT_TOKEN_WEIGHT

    @staticmethod
    def are_alike(scheduler: Scheduler, newest: Schedule, num_in_flight: int) -> bool:
        """Whether every request got one token from the newest step and will from the next, if nobody comes or ends."""
        running, step = scheduler.running, newest.step

        def goes_on(row: ScheduledRow, request: Request) -> bool:
            num_computed = row[1] + 1
            return (
                row[0] is request
                and row[2] == row[3] == 1
                and row[4] == request.num_preemptions
                and request.num_computed_tokens == num_computed
                and request.num_confirmed_tokens == num_computed - num_in_flight
                and request.num_tokens_in_flight == num_in_flight
                and request.num_uncomputed_tokens == 1
                and request.last_scheduled_step == step
                and not (request.paused or request.waits_for_reply or request.num_lost_steps)
            )

        if len(newest.rows) != len(running) or scheduler.num_waiting or not running or not scheduler.is_plain:
            return False
        return step == scheduler.num_steps - 1 and all(map(goes_on, newest.rows, running))

    def form(self) -> bool:
        """As `Scheduler.schedule`; False where the step would not be alike: then nothing has changed."""
        scheduler = self._scheduler
        blocks = scheduler.blocks
        growing = self._growing.get(self.num_formed % blocks.block_size, ())
        if self.num_formed >= self._num_steps or len(growing) > blocks.pool.num_free_blocks:
            return False
        scheduler.policy.prefer(Load(len(self.rows), False))
        if not self.num_formed:
            scheduler.waiting.look((), scheduler.held)
        for request in growing:
            self.settle_one(request)
            scheduler.places.grow(request)
        self.num_formed += 1
        self.num_keys += len(self.rows)
        scheduler.pass_alike(self._charges, self._tokens)
        return True

    def reply(self) -> None:
        """As `Scheduler.update` with what the device chose."""
        blocks = self._scheduler.blocks
        filling = self._filling.get(self.num_replied % blocks.block_size, ()) if blocks.prefix_caching else ()
        for request in filling:
            self.settle_one(request)
            blocks.name_blocks(request, request.num_confirmed_tokens + 1)
        self.num_replied += 1

    def settle(self) -> None:
        """All requests are as they would be."""
        if self._settled != (settled := (self.num_formed, self.num_replied)):
            self._settled = settled
            for request in self.rows:
                self.settle_one(request)

    def settle_one(self, request: Request) -> None:
        """The request is as it would be, if it is one of these steps."""
        if (start := self._starts.get(request)) is None:
            return
        num_computed, num_output = start
        output = request.output_token_ids
        missing = num_output + self.num_replied - len(output)
        if missing:
            place = len(request.prompt_token_ids) + len(output)
            output += self._tokens_at(request, place, place + missing)
            request.num_new_tokens = 1
        request.num_computed_tokens = num_computed + self.num_formed
        request.num_confirmed_tokens = num_computed - self._num_in_flight + self.num_replied
        request.num_tokens_in_flight = self._num_in_flight + self.num_formed - self.num_replied
        request.last_scheduled_step = self._first_step - 1 + self.num_formed

    def in_flight(self) -> list[Schedule]:
        """The steps that have been formed and not been replied to, as `schedule` would have returned them."""
        number = self._first_step + self.num_formed - 1
        rows = [ScheduledRow(each, each.num_computed_tokens - 1, 1, 1, each.num_preemptions) for each in self.rows]
        return [Schedule(number, rows)] * self._num_in_flight


def num_steps_alike(running: Sequence[Request], most: Callable[[Request], int]) -> int:
    """Steps that may be formed before one of the requests ends.

    Args:
        running: Of which each has `most(request)` tokens of output in the end.
        most: Tokens.
    """
    return min([most(each) - len(each.output_token_ids) for each in running]) - 1
