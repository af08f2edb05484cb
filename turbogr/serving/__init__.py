"""An export as an HTTP service; nothing here imports torch."""
