"""Chat templates of models, rendered in a sandboxed process."""
