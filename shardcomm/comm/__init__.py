"""Collectives between ranks: the interface, its transports, how they are made, and meshes of ranks."""
