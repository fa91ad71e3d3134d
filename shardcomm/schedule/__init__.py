"""What is gathered, awaited, released and reduced in a step, and when, as data."""
