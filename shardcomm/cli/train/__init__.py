"""The main job: a byte-level GPT trained on real text with everything sharded. `shardcomm train` runs it."""
