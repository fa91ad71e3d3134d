"""An exponential moving average (EMA) of a sharded model's parameters: each rank averages its own rows.

It is what `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn` is to a plain model. That one makes a deep
copy, which a sharded model does not allow, since its memory belongs to its engine::

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
    """`decay * average + (1 - decay) * parameters`, after each `update()`; the first takes the parameters.

    As large as this rank's shards, and in their dtypes and memory. Buffers are the model's own, as in AveragedModel by
    default; so are parameters of integers.

    Attributes:
        decay: from 0 to 1.
        n_averaged: how many updates there were.

    Raises:
        TypeError: `engine` is not what `fully_shard` returns.
        ValueError: `decay` is not a number from 0 to 1.
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
        self._state = {
            _PREFIX + name: parts[param].of(rows.get(param, param))
            for name, param in engine.model.named_parameters(remove_duplicate=False)
        }

    @torch.no_grad()
    def update(self) -> None:
        """Takes the parameters of now into the average; call it after each optimizer's step. No communication.

        Raises:
            RuntimeError: it is called inside of `applied()`.
        """
        self._check_not_applied("update")
        if self.n_averaged == 0:
            torch._foreach_copy_(self._averages, self._shards)
        else:
            torch._foreach_lerp_(self._averages, self._shards, 1 - self.decay)
        self.n_averaged += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """In here the model's parameters are the averages: to evaluate, or to save; collective only in what it calls.

        The trained ones are back afterwards, bit for bit, after an exception too.

        Raises:
            RuntimeError: it is called inside of itself; or at the end parameters were changed, by an optimizer's step
                for instance, of which the average then has the change.
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
        """This rank's part of the average, for `torch.distributed.checkpoint`; see `Engine.state_dict`.

        Names are those of AveragedModel's state dict, buffers left out. With `load_state_dict` this is DCP's
        `Stateful`: `{"model": engine, "ema": ema}` is saved, and loaded by any number of ranks. For full tensors, take
        `engine.full_state_dict()` inside of `applied()`.

        Raises:
            RuntimeError: it is called inside of `applied()`; or other ranks have other parameters of the same names.
        """
        self._check_not_applied("state_dict")
        self._engine.elsewhere.check("ExponentialMovingAverage.state_dict")
        return {_COUNT: torch.tensor(self.n_averaged), **self._state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes this rank's part of what `state_dict()` gave, or of full tensors; no communication.

        Raises:
            ValueError: a name is missing or unknown, or a shape differs; nothing is changed then.
            RuntimeError: it is called inside of `applied()`.
        """
        self._check_not_applied("load_state_dict")
        check_type(
            "load_state_dict", "state_dict", state_dict, Mapping, "a mapping of names to values"
        )
        expected = {_COUNT, *self._state}
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
        with plain():  # a graph of the trained parameters is right again when they are back
            versions = torch.autograd.grad_mode._unsafe_preserve_version_counter(self._params)
        with versions:
            self._swap()
            try:
                yield
            finally:
                self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for shard, average in zip(self._shards, self._averages, strict=True):
            kept = shard.clone()
            shard.copy_(average)
            average.copy_(kept)
        written(self._params)

    def _versions(self) -> list[int]:
        with plain():
            return [param._version for param in self._params]
