"""Readers and writers of weight files, which map files to named tensors. Formats do not depend on the model family."""
