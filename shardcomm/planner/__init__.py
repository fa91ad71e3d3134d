"""What a model takes of each rank, in memory and in communication, before anything is allocated."""
