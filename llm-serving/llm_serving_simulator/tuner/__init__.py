"""The tuner: searches in simulations for the configuration that meets an objective best."""
