"""Optimizers, loss scaling and averages for sharded models."""
