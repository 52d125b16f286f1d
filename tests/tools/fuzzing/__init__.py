"""The readers of untrusted bytes as functions for a fuzzer; each may raise only the errors that it documents."""

from tools.fuzzing.mutation import mutated
from tools.fuzzing.targets import TARGETS, Target

__all__ = ["TARGETS", "Target", "mutated"]
