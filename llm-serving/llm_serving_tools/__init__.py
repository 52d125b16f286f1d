"""Commands for operators: start and stop a server in the background, call its HTTP routes, answer a batch without a
server, check a configuration, convert files, and replay recordings.

This package imports `llm_serving`, which never imports it. `llm_serving.cli.main` loads its commands by name.
"""
