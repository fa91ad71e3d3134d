"""What tests of checkpoints share."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.checkpoint.state_dict import get_state_dict

from support.saved_nets import trained


@pytest.fixture(scope="session")
def expected() -> dict[str, Any]:
    model, optim = get_state_dict(*trained())
    return {"model": model, "optim": optim}
