"""What a scheduler was told and decided, in files, and the same decisions made again from them."""
