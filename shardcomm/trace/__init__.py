"""A run's communication: counted, recorded, and shown for all ranks on one clock."""
