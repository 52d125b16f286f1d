"""The HTTP server: uvicorn behind limits of size, time, memory and number of connections.

Every limit is a key of the section `serving_config`.
"""
