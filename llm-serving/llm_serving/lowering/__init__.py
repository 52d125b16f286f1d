"""Networks as MindSpore Cells: a graph of Cells, one program operator, or a network of MindFormers."""
