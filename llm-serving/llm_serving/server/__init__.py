"""The HTTP server: the routes of OpenAI, Anthropic, TGI and older servers."""
