"""Where work runs and in which order, and what waits for its end."""
