"""A trained run as one folder that other programs use without TurboGR: vectors, a graph, an index, and a check."""
