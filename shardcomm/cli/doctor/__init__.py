"""`shardcomm doctor`: what works on this machine, what does not and why, and whether results are right.

From the command line down::

    command      options -> findings and the self-test; exit status
    findings     versions, CUDA, NCCL, Triton; each transport, or why it cannot be used and what to do
    memory       what limits the memory that ranks share
    self_test    collectives and copies against torch's own arithmetic; the path that each collective took
    screen       all of it for people
"""
