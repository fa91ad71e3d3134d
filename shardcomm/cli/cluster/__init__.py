"""`shardcomm cluster`: a program on several hosts that are one machine, with slow links and kills."""
