"""Speculative decoding: proposes draft tokens, which the next step verifies, if this is expected to save time."""

from llm_serving.speculation.controller import SpeculationController
from llm_serving.speculation.draft_model import DraftModelProposer
from llm_serving.speculation.ngram import NgramProposer

__all__ = ["DraftModelProposer", "NgramProposer", "SpeculationController"]
