"""What reads bytes from outside, each as a function for a fuzzer: it may raise nothing but the errors it promises."""

from tools.fuzzing.mutation import mutated
from tools.fuzzing.targets import TARGETS, Target

__all__ = ["TARGETS", "Target", "mutated"]
