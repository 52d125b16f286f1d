"""Receipts: verifiable records of what determined a response, and the command that computes the response again.

The server never imports this package. `llm_serving.server.receipts` loads `issuer` by name when a client requests a
receipt, and `llm-serving verify` loads `verify`.
"""
