"""State dicts of sharded models and their optimizers, and folders of checkpoints."""
