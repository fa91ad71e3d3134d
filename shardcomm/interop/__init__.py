"""shardcomm in other programs: torch's collectives, backends and FSDP2; JAX, Lightning, accelerate; Chakra's traces."""
