"""The path from a parsed request of any protocol to its response."""
