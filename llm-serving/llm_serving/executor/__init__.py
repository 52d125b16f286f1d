"""Executors run steps on WorkAgents, start these processes, and replace those that die."""
