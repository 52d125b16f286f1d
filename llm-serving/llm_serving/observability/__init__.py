"""The event log of requests and steps, explanations, timeline, snapshots and `/metrics`."""
