"""Guesses of what comes next, for the scheduler to have checked where that costs little."""

from llm_serving.speculation.draft_model import DraftModel
from llm_serving.speculation.drafter import Drafter

__all__ = ["DraftModel", "Drafter"]
