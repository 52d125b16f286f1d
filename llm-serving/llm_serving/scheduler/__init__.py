"""The scheduler of one replica: a pure state machine without clock and I/O."""

from llm_serving.scheduler.components import SchedulingRules
from llm_serving.scheduler.limits import PreemptionMode, SchedulerLimits
from llm_serving.scheduler.schedule import Schedule, ScheduledRow
from llm_serving.scheduler.scheduler import Scheduler

__all__ = ["PreemptionMode", "Schedule", "ScheduledRow", "Scheduler", "SchedulerLimits", "SchedulingRules"]
