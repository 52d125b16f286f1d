"""The subcommands of `llm-serving`. The function `add_to` of a module declares its arguments.
Slow imports are inside the functions that run a command, so that `config check` and `version` start fast.
"""
