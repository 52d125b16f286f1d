"""Networks in MindSpore: as a graph of Cells, as one custom operator, or as a network of MindFormers."""
