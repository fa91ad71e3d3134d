"""What a run's communication amounts to: counted, recorded, and of all ranks on one clock."""
