"""Recording of a scheduler's inputs and decisions in files."""
