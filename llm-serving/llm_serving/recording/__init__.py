"""Records the inputs and decisions of a scheduler in files, and replays them."""
