"""Structured output: response formats as grammars of llguidance, which computes the allowed tokens of each step."""

from llm_serving.text.structured_output.compiler import ConstraintCompiler, GrammarLimits
from llm_serving.text.structured_output.grammars import Grammar, GrammarError
from llm_serving.text.structured_output.matcher import TokenConstraint

__all__ = ["ConstraintCompiler", "Grammar", "GrammarError", "GrammarLimits", "TokenConstraint"]
