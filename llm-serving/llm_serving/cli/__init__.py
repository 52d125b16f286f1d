"""The subcommands of `llm-serving`.

Each module of subcommands has `add_to`, which describes their arguments. Slow imports are in the functions that run
them,
so that `config check` and `version` answer at once.
"""
