"""What a framework's user says of how a model is to be sharded: the keyword arguments of `fully_shard`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from shardcomm.engine.sharding import fully_shard


def check_settings(names: Iterable[str], whose: str) -> None:
    """TypeError if one of `names` is no argument of `fully_shard`, or one that the framework's class sets itself.

    Args:
        names: The names of the arguments.
        whose: Whom they were given to; the message begins with it.
    """
    accepted = [n for n in inspect.signature(fully_shard).parameters if n not in ("model", "comm")]
    for name in names:
        if name not in accepted:
            raise TypeError(
                f"{whose}: {name} is no argument; accepted are those of fully_shard: {', '.join(accepted)}"
            )
