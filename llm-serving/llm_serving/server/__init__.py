"""The HTTP server: the routes of OpenAI, Anthropic, TGI and the older `llm-serving` server."""
