"""Parsers of the text that a model generates: reasoning and the parts of a chat message."""
