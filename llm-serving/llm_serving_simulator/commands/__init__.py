"""The subcommands of `llm-serving` that belong to the simulator, one module each; `llm_serving.cli.main` names them."""
