"""An exponential moving average (EMA) of a sharded model's parameters: each rank averages its own rows.

For a sharded model it takes the place of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`. That class
makes a deep copy, which a sharded model does not allow, since its memory belongs to its engine::

    shards   ──lerp──► averages         update(), after each optimizer's step: no communication
             ◄──swap─►                  applied(): forwards, state dicts and gathers through the engine
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardcomm.arguments.checks import check_type
from shardcomm.checkpoint.state_dict import parts_of
from shardcomm.engine.engine import Engine
from shardcomm.parameter.plain import plain
from shardcomm.parameter.shard_tensor import check_value, load_value
from shardcomm.parameter.versions import written

_PREFIX = "module."
_COUNT = "n_averaged"


class ExponentialMovingAverage:
    """An exponential moving average of a sharded model's parameters: `decay * average + (1 - decay) * parameters`.

    The first `update` takes the parameters as they are. The average takes as much memory as this rank's shards, in
    their dtypes and on their device. Buffers stay the model's own, as AveragedModel has it by default, and so do
    parameters of integers.

    Args:
        engine: What `fully_shard` returned.
        decay: The weight of the old average, from 0 to 1.

    Attributes:
        decay: As given.
        n_averaged: How many updates there were.

    Raises:
        TypeError: `engine` is not what `fully_shard` returned.
        ValueError: `decay` is not a number from 0 to 1.

    Example:
        ```python
        model = torch.nn.Linear(64, 64)
        engine = shardcomm.fully_shard(model, comm)
        ema = shardcomm.ExponentialMovingAverage(engine, decay=0.999)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        ema.update()
        with ema.applied(), torch.no_grad():
            model(torch.randn(8, 64))  # computes with the average
        ```
    """

    def __init__(self, engine: Engine, decay: float = 0.999) -> None:
        check_type(
            "ExponentialMovingAverage", "engine", engine, Engine, "the Engine that fully_shard gave"
        )
        if isinstance(decay, bool) or not (isinstance(decay, int | float) and 0 <= decay <= 1):
            raise ValueError(
                f"ExponentialMovingAverage: decay is {decay!r}; it must be a number from 0 to 1, such as 0.999"
            )
        engine.release()  # so that the model shows its shards
        self.decay = decay
        self.n_averaged = 0
        self._engine = engine
        self._applied = False
        buckets = [bucket for unit in engine.units for bucket, _ in unit.buckets]
        buckets = [b for b in buckets if b.shard.is_floating_point() or b.shard.is_complex()]
        self._shards = [bucket.shard for bucket in buckets]
        self._averages = [shard.clone() for shard in self._shards]
        self._params = tuple(param for bucket in buckets for param in bucket.shards)
        rows: dict[nn.Parameter, torch.Tensor] = {}
        with plain():
            for bucket, average in zip(buckets, self._averages, strict=True):
                for p in bucket.shards:
                    rows[p] = average.as_strided(p.shape, p.stride(), p.storage_offset())
        parts = parts_of(engine.units)
        named = {_PREFIX + n: p for n, p in engine.model.named_parameters(remove_duplicate=False)}
        self._state = {n: parts[p].of(rows[p]) for n, p in named.items() if p in rows}
        self._integers = {n: (parts[p], p) for n, p in named.items() if p not in rows}

    @torch.no_grad()
    def update(self) -> None:
        """Takes the current parameters into the average; call it after each optimizer's step. No communication.

        Raises:
            RuntimeError: It is called inside of `applied()`.
        """
        self._check_not_applied("update")
        if self.n_averaged == 0:
            torch._foreach_copy_(self._averages, self._shards)
        else:
            torch._foreach_lerp_(self._averages, self._shards, 1 - self.decay)
        self.n_averaged += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the model's parameters are the averages, to evaluate or to save them.

        The trained parameters are back afterwards, bit for bit, also after an exception. The context itself does not
        communicate.

        Yields:
            Nothing; the model has the averages meanwhile.

        Raises:
            RuntimeError: It is called inside of itself. Or parameters were changed in it, by an optimizer's step for
                instance; then the average has that change.
        """
        self._check_not_applied("applied")
        self._engine.release()
        with self._swapped():
            self._applied = True
            before = self._versions()
            try:
                yield
                if self._versions() != before:
                    raise RuntimeError(
                        "ExponentialMovingAverage: parameters were changed inside of applied(), where they are the "
                        "average, which has that change now; step and load outside of it"
                    )
            finally:
                self._applied = False
                self._engine.release()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the average, for `torch.distributed.checkpoint` (DCP); see `Engine.state_dict`.

        Names are those of AveragedModel's state dict, without buffers. Together with `load_state_dict` it makes this
        object a `Stateful` of DCP: DCP saves `{"model": engine, "ema": ema}`, and any number of ranks can load it. For
        full tensors, call `engine.full_state_dict()` inside of `applied()`.

        Returns:
            A flat dict: ShardTensors for the averages, and the number of updates.

        Raises:
            RuntimeError: It is called inside of `applied()`, or other ranks have other parameters of the same names.
        """
        self._check_not_applied("state_dict")
        self._engine.elsewhere.check("ExponentialMovingAverage.state_dict")
        # Copies, since DCP loads into what it gets here.
        with plain():
            integers = {n: part.of(p.detach().clone()) for n, (part, p) in self._integers.items()}
        return {_COUNT: torch.tensor(self.n_averaged), **self._state, **integers}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads this rank's part of an average. No communication. Parameters of integers stay the model's own.

        Args:
            state_dict: What `state_dict()` gave, or full tensors by the same names.

        Raises:
            TypeError: `state_dict` is no mapping.
            ValueError: A name is missing or unknown, or a shape differs; nothing is changed then.
            RuntimeError: It is called inside of `applied()`.
        """
        self._check_not_applied("load_state_dict")
        check_type(
            "load_state_dict", "state_dict", state_dict, Mapping, "a mapping of names to values"
        )
        expected = {_COUNT, *self._state, *self._integers}
        if expected != state_dict.keys():
            raise ValueError(
                f"load_state_dict: state_dict lacks {sorted(expected - state_dict.keys())} and has unknown "
                f"{sorted(state_dict.keys() - expected)}"
            )
        for name, current in self._state.items():
            check_value("load_state_dict", name, current, state_dict[name])
        for name, current in self._state.items():
            load_value(current, state_dict[name])
        self.n_averaged = int(state_dict[_COUNT])

    def _check_not_applied(self, operation: str) -> None:
        if self._applied:
            raise RuntimeError(
                f"ExponentialMovingAverage: {operation} inside of applied(), where the parameters are the average; "
                "call it outside"
            )

    @contextlib.contextmanager
    def _swapped(self) -> Iterator[None]:
        with plain():  # graphs of the trained parameters stay right: these come back unchanged
            versions = torch.autograd.grad_mode._unsafe_preserve_version_counter(self._params)
        with versions:
            space = self._space()
            self._swap(space)
            try:
                yield
            finally:
                self._swap(space)

    def _space(self) -> dict[torch.device, torch.Tensor]:
        """Memory for the largest shard of each device: a swap takes none, and so does not fail in its middle."""
        most: dict[torch.device, int] = {}
        for shard in self._shards:
            most[shard.device] = max(shard.nbytes, most.get(shard.device, 0))
        return {
            device: torch.empty(nbytes, dtype=torch.uint8, device=device)
            for device, nbytes in most.items()
        }

    @torch.no_grad()
    def _swap(self, space: Mapping[torch.device, torch.Tensor]) -> None:
        for shard, average in zip(self._shards, self._averages, strict=True):
            kept = space[shard.device][: shard.nbytes].view(shard.dtype).view(shard.shape)
            kept.copy_(shard)
            shard.copy_(average)
            average.copy_(kept)
        written(self._params)

    def _versions(self) -> list[int]:
        with plain():
            return [param._version for param in self._params]
