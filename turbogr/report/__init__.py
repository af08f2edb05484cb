"""A run folder as one self-contained HTML page, and the charts of the whole project."""
