"""The HTTP server: OpenAI, TGI and legacy routes over one engine."""

from llm_serving.server.app import create_app, serve

__all__ = ["create_app", "serve"]
