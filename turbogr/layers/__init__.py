"""Layers of sequence models, on jagged tokens; nothing here knows of other processes."""
