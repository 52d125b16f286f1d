"""Communication between master and WorkAgents: message frames on a socket, and arrays in shared memory; no pickle."""
