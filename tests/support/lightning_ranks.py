"""What ranks under Lightning's Fabric and under its Trainer have in common."""

from __future__ import annotations

import logging
import os
import warnings

import torch
from torch import nn

OURS = "ShardcommStrategy"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)
    )


def quiet() -> int:
    """Without Lightning's announcements; returns the number of ranks."""
    warnings.simplefilter("ignore")
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel("ERROR")
    return int(os.environ["LOCAL_WORLD_SIZE"])  # Lightning removes WORLD_SIZE after a run
