"""A step's time before there are machines: the schedule that the engine runs, executed on a clock."""
