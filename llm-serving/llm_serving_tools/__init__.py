"""What an operator runs beside a server: its start in the background, clients of its HTTP routes, batches without a
server, the check of a configuration, converters of files, and the replay of recordings.

This package imports `llm_serving`, which never imports it. `llm_serving.cli.main` loads its commands by name.
"""
