"""What the YAML has: one file a section, with unit and meaning under each key."""
