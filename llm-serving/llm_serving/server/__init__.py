"""The HTTP server: OpenAI, TGI and legacy routes over one engine."""
