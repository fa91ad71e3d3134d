"""A unit's memory: its shard, full buffer and gradients, how these are reduced, and offload."""
