"""OpenAI's files and batches, kept in SQLite so that they survive the end of the process."""
