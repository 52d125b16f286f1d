"""Requests that were accepted and may come again: by an Idempotency-Key, or for the rest of a stream."""
