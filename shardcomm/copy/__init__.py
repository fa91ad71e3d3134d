"""Which rectangles move where: the CopyPlan, and what executes it."""
