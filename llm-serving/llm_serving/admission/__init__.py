"""Who is let in: the limits at the door, the time a refused one is given, and who of those told comes back."""
