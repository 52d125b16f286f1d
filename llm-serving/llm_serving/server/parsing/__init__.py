"""Reads requests (body, headers, caller), and builds error responses in the form of each protocol."""
