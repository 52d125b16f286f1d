"""OpenAI's files and batches, stored in SQLite so that they survive the end of the process."""
