"""output_parsers."""
