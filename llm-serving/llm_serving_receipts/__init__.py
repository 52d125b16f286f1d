"""Receipts: verifiable records of what a response was computed from, and the command that computes it again.

The server never imports this package. `llm_serving.server.receipts` loads `issuer` by name when a client asks for a
receipt, and `llm-serving verify` loads `verify`.
"""
