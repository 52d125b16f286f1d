"""What an answer was computed from, by what and with what result: enough to compute it again and to compare."""
