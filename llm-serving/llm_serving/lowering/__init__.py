"""Networks in MindSpore: as a graph of Cells, as one program operator, or as a network of MindFormers."""
