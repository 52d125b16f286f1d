"""Readers and writers of weight files, which map files to named tensors for any model family."""
