"""Tokenizers of all vocabulary kinds, and incremental detokenization."""
