"""Who computes what in the next step: a pure state machine, no clock, no I/O."""

from llm_serving.scheduler.limits import PreemptionMode, SchedulerLimits
from llm_serving.scheduler.schedule import Schedule, ScheduledRow
from llm_serving.scheduler.scheduler import Scheduler

__all__ = ["PreemptionMode", "Schedule", "ScheduledRow", "Scheduler", "SchedulerLimits"]
