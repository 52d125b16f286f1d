"""The protocols, each with its schemas beside its routes."""
