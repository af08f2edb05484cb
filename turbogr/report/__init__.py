"""A run folder as one self-contained HTML page."""
