"""The copies that PyTorch FSDP2 makes around the all-gather of one unit.

As `foreach_all_gather` and `foreach_all_gather_copy_out` of torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GatherCopies:
    """Of a rank among `ranks` that holds `shards`, which are gathered in `dtype`.

    Attributes:
        sent: What the rank sends: its shards one after the other.
        gathered: What it receives: what each rank has sent.
        full: Of each parameter a row for each rank.
    """

    def __init__(self, shards: Sequence[Tensor], ranks: int, dtype: torch.dtype) -> None:
        self._shards = shards
        self._parts = [shard.numel() for shard in shards]
        device = shards[0].device
        self.sent = torch.empty(sum(self._parts), dtype=dtype, device=device)
        self._cast = torch.empty_like(self.sent)
        self.gathered = torch.zeros(ranks * sum(self._parts), dtype=dtype, device=device)
        self.full = [torch.empty(ranks, part, dtype=dtype, device=device) for part in self._parts]

    def copy_in(self) -> None:
        """Casts the shards, and then copies them to where they are sent from."""
        casts = self._cast.split(self._parts)
        torch._foreach_copy_(casts, self._shards)
        torch._foreach_copy_(self.sent.split(self._parts), casts)

    def copy_out(self) -> None:
        """Copies what was gathered to the parameters."""
        rows = self.gathered.view(len(self.full[0]), -1)
        torch.split_with_sizes_copy(rows, self._parts, dim=1, out=self.full)

    def run(self) -> None:
        """Makes both."""
        self.copy_in()
        self.copy_out()
