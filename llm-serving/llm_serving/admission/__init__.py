"""Admission control: request validation, queue limits, predicted time to first token, and early refusal."""
