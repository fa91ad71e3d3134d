"""`shardcomm ps`: the groups of this host, what each rank is in, and its Python stack. It stops no rank."""
