"""Recording of a scheduler's inputs and decisions in files, and replay of these files."""
