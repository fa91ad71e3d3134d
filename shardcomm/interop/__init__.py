"""Our communication under torch's interfaces: its collectives, its backends, and its FSDP2."""
