"""The sections of the YAML. Each module has the keys of a section and their checks."""
