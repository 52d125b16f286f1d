"""Shows what a server does: event log, latency breakdown of a request, timeline, snapshots and `/metrics`."""
