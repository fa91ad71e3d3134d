"""`fully_shard`, and the engine that trains what it has sharded."""
