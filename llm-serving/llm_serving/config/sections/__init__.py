"""The sections of the YAML: in each module the keys with their texts, and the checks of these keys."""
