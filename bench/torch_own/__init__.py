"""Torch's own tests of torch.distributed, run with a backend: what bench/torch_tests.py is made of."""
