"""What scheduling brings: each experiment starts servers of its own, loads them over HTTP and compares."""
