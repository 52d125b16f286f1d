"""The HTTP server: uvicorn with limits of size, time, memory and number of connections.

Every limit is a key of the section `serving_config`.
"""
