"""Communication between master and WorkAgents: message frames on a socket, arrays in shared memory, no pickle."""
