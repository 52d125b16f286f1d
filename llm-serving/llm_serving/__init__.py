"""LLM serving on MindSpore: a master that schedules, and WorkAgents that compute."""

__version__ = "0.1.0"
