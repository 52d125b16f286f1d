"""Idempotent retries by Idempotency-Key, and streams that a client may resume."""
