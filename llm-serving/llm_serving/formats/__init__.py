"""Readers and writers of weight files. A reader maps a file to tensors by name, for any model family."""
