"""The subcommands of `llm-serving` beside the server, one module each. `llm_serving.cli.main` loads them by name."""
