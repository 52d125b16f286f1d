"""How a step reaches the WorkAgent, and who starts a new one when that has died."""
