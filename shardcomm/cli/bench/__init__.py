"""`shardcomm bench`: what collectives cost on this machine, measured and printed as nccl-tests does.

From the command line down::

    command      options -> BenchOptions; local ranks or a launcher's; exit status
    driver       each operation, on each size or layer, over each transport -> Results
    measure      a row: limit, time, check
    operations   all_gather, reduce_scatter, all_reduce, broadcast: counts, bandwidth, run, expected values
    layers       gather, reduce, pack, unpack: the same on the parameters of a layer
    transports   what carries the collectives, or why it cannot
    case         an operation on a size or layer, ready to be run
    timing       the timed loop, its spread, what the loop itself costs
    table, files, plot, compare    what is made of Results; fit: latency and bandwidth
"""
