"""Conversion between text and token ids, and other text processing: chat templates, structured output, tool calls."""
