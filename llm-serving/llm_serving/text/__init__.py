"""Text to token ids and back, chat templates, structured output, and parsers of tool calls."""
