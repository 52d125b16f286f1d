"""From files to named tensors, in the forms in which models come. No form knows which names a family wants."""
