"""WorkAgents on other machines, which Ray starts: placement, connections, model files, and transfer of KV blocks."""
