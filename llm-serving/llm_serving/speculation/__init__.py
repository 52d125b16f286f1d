"""Speculative decoding: proposes draft tokens that a later step verifies, if that costs little."""

from llm_serving.speculation.controller import SpeculationController
from llm_serving.speculation.draft_model import DraftModelProposer
from llm_serving.speculation.ngram import NgramProposer

__all__ = ["DraftModelProposer", "NgramProposer", "SpeculationController"]
