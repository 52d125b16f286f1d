"""Readers and writers of weight files: from files to named tensors. No format knows the tensor names of a family."""
