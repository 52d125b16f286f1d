"""Conversion between text and token ids, chat templates, structured output and parsing of tool calls."""
