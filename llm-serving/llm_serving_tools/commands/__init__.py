"""The subcommands of `llm-serving` that need no server code, one module each; `llm_serving.cli.main` names them."""
