"""Parsers of generated text: reasoning, and the parts of a chat message."""
