"""shardcomm moves model shards between ranks."""
