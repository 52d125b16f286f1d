"""The HTTP protocols. Each has its schemas next to its routes."""
