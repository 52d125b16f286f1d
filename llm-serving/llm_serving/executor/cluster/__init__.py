"""WorkAgents that Ray starts on other machines: placement, connections, model files, and transfer of KV blocks."""
