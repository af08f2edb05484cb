"""A run folder, or several, as one self-contained HTML page."""
