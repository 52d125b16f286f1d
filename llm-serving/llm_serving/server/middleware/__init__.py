"""ASGI middleware: authentication, rate limits, origins of browsers, access log, tracing."""
