"""The simulator: the engine of `llm_serving` under virtual time, and the tuner that searches with it.

This package imports `llm_serving`, which never imports it.
"""
