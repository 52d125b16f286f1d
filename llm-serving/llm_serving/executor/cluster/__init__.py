"""WorkAgents on other machines, which Ray starts: placement, connections, model files, transfer of KV blocks."""
