"""The subcommands of `llm-serving`, one file each, and what they alone use.

A file of a subcommand has `add_to`, which describes its arguments. What takes time to import is imported by its `run`,
so that `config check` and `version` answer at once.
"""
