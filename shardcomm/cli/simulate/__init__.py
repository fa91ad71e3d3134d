"""`shardcomm simulate`: how long a step would take on machines that need not be there."""
