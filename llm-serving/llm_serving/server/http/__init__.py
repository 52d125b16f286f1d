"""The HTTP server: uvicorn with limits of size, time, memory and connections, which `serving_config` sets."""
