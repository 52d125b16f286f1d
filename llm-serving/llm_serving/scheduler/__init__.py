"""Who computes what in the next step: a pure state machine, no clock, no I/O."""

from llm_serving.scheduler.scheduler import Schedule, ScheduledRow, Scheduler, SchedulerLimits

__all__ = ["Schedule", "ScheduledRow", "Scheduler", "SchedulerLimits"]
