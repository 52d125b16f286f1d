"""The decoding of a step, the choice of its first stage, and the bounds on how long a running request is left out."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.core.request import RUNNING, Request
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler.bounds import ClassBounds
from llm_serving.scheduler.fair_sharing import WeightedFairSharing
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.policies import Policy, PolicyInput, Preference
from llm_serving.scheduler.preemption import Preemptor
from llm_serving.scheduler.running import RunningSnapshot
from llm_serving.scheduler.schedule import StepPlan


class DecodeStage:
    """Gives running requests their next token, and decides whether decoding or prefill comes first in a step."""

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: Policy,
        blocks: BlockManager,
        sharing: WeightedFairSharing,
        preemptor: Preemptor,
        bounds: Sequence[ClassBounds],
    ) -> None:
        self.num_steps_without_prefill = 0
        """Consecutive steps in which prompts waited and none was computed."""
        self._max_prefill_gap = limits.max_prefill_gap
        self._policy = policy
        self._blocks = blocks
        self._sharing = sharing
        self._preemptor = preemptor
        self._max_prompt_gaps = {each.name: each.max_prompt_gap for each in bounds}

    def schedule(self, plan: StepPlan, running: RunningSnapshot) -> None:
        """Add a token for each decoding request while budget and cache last."""
        block_size = self._blocks.block_size
        for request in running.decoding:
            if plan.budget == 0:
                return
            if request.status is not RUNNING:
                continue
            # A table always holds what is computed, so only the first token of a block may need a new block.
            if request.num_computed_tokens % block_size or self._preemptor.ensure_blocks(request, plan):
                plan.add_decode(request)

    def preference(self, running: RunningSnapshot, has_prompts: bool, step: int) -> Preference:
        """Return the policy's preference, overridden where a bound requires it.

        Args:
            running: Before the step.
            has_prompts: Whether a prompt, or a part of one, is still to be computed.
            step: Number of the step to form.
        """
        preference = self._policy.prefer(PolicyInput(running.num_decoding, has_prompts))
        last = running.least_scheduled_step
        gap = 0 if last is None else step - 1 - last
        if gap >= self._policy.max_decode_gap or (gap > 0 and self._exceeds_class_gap(running.decoding, step - 1)):
            return Preference.DECODE_FIRST
        if has_prompts and self.num_steps_without_prefill >= self._max_prefill_gap:
            return Preference.PREFILL_FIRST
        return preference

    def _exceeds_class_gap(self, decoding: Sequence[Request], last_step: int) -> bool:
        """Whether prefills left out a contending class for as many steps as its weight allows."""
        names = {request.request_class.name for request in decoding}
        gaps = {name: self._sharing.max_decode_gap(name) for name in names}
        return any(
            (gap := gaps[each.request_class.name]) is not None and last_step - each.last_scheduled_step >= gap
            for each in decoding
        )

    def count_gap_violations(self, plan: StepPlan, running: RunningSnapshot, has_prompts: bool) -> int:
        """Record a formed step, and count the bounds on gaps that it breaks; `running`: before the step."""
        self.num_steps_without_prefill = (
            0 if plan.computes_prompts or not has_prompts else self.num_steps_without_prefill + 1
        )
        last = min(
            [each.last_scheduled_step for each in running.decoding if each.status is RUNNING], default=plan.number
        )
        is_decode_gap_broken = plan.number - last > self._policy.max_decode_gap
        prompts = [each for each in running.prefilling if each.status is RUNNING]
        return is_decode_gap_broken + sum([self._breaks_prompt_gap(each, plan.number) for each in prompts])

    def _breaks_prompt_gap(self, prompt: Request, step: int) -> bool:
        """Whether this step is the first that leaves out a running prompt for too long."""
        since = max(prompt.last_scheduled_step, prompt.class_change_step)
        return step - since == self._max_prompt_gaps[prompt.request_class.name] + 1
