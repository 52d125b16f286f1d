"""Forms that an answer must have, and the tokens that keep to them; llguidance decides what these are."""

from llm_serving.text.structured_output.compiler import ConstraintCompiler, GrammarLimits, TokenConstraint
from llm_serving.text.structured_output.grammars import Grammar, GrammarError

__all__ = ["ConstraintCompiler", "Grammar", "GrammarError", "GrammarLimits", "TokenConstraint"]
