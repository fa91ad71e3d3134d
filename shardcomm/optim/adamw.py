"""AdamW for parameters that lie back to back in memory, as a bucket's shards do: it updates many as one.

One step, for a group of five parameters in two buckets, of which the fourth has no gradient::

    parameters   | a | b |   c   |    | d | e | f |
    gradients    | a | b |   c   |    | d |   | f |
    updated as   |       run     |    |run|   |run|

The arithmetic is PyTorch's own fused kernel. Here it gets three runs instead of five parameters. A model has hundreds
of small parameters, and the kernel spends most of its time on the overhead of each. The moments of a run are one
tensor, and each parameter's state is a view of it, under PyTorch's names. Any parameters will do: those that have no
neighbours are updated one by one.

Reference: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import is_
from typing import Any

import torch
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from shardcomm.parameter.optimizer_steps import without_compiler

_CHOICES = {"fused": True, "foreach": False, "capturable": False, "differentiable": False}
"""What torch's AdamW leaves to the caller of how a step is computed, and what it is here."""

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")  # the last one under `amsgrad`


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(..., fused=True)`, with one update for each run of neighbours in memory.

    Arguments, parameter groups, results and `state_dict` are PyTorch's; each of the two can load the other's state. As
    in PyTorch, state has its parameter's dtype, and a parameter without gradient is skipped. A run ends where the group
    ends, where a parameter has no gradient, where step counts differ (because one was skipped before), and at gaps for
    alignment. There are no gaps between parameters of a multiple of 128 bytes.

    To replace a parameter's state, call `load_state_dict`, put other tensors there, or write into those that are there.
    What PyTorch does not count as a write to a step is not noticed: one through `.data` or NumPy, or in inference mode.

    Args:
        params: Parameters, or dicts of parameter groups.
        lr: The learning rate.
        betas: The decays of the averages of the gradient and of its square.
        eps: What is added to the denominator.
        weight_decay: The factor of decoupled weight decay.
        amsgrad: Whether to use the largest average of squares so far.
        maximize: Whether to go up the gradient instead of down.
        choices: PyTorch's `fused=True`, and `foreach`, `capturable` and `differentiable` as False. They change nothing.

    Raises:
        TypeError: PyTorch's AdamW has no such argument either.
        ValueError: A choice is another than these, or a number is none that PyTorch accepts.

    Example:
        ```python
        model = torch.nn.Linear(64, 64)
        engine = shardcomm.fully_shard(model, comm)
        optimizer = shardcomm.AdamW(model.parameters(), lr=3e-4)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        ```

    References:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **choices: bool | None,
    ) -> None:
        for name, given in choices.items():
            if name not in _CHOICES:
                raise TypeError(
                    f"AdamW: there is no argument {name}=; accepted are those of torch.optim.AdamW"
                )
            if given is not None and given is not _CHOICES[name]:
                raise ValueError(
                    f"AdamW: {name} is {given!r}; its steps are fused ones, so that it must be {_CHOICES[name]}, or be "
                    f"left out. torch.optim.AdamW(..., {name}={given!r}) takes this model's parameters, too"
                )
        self._plans: dict[int, _Plan] = {}  # by index of the group
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=True
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters that have options of their own.

        Args:
            param_group: The parameters as "params", and options that differ from the constructor's.
        """
        without_compiler(torch.optim.AdamW.add_param_group)(self, param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Ends `load_state_dict` and unpickling: the next step gathers the new state into runs."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._plans = {}
        for group in self.param_groups:
            group["fused"] = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient.

        Args:
            closure: A function that computes the loss and its gradients first, if it is given.

        Returns:
            What `closure` returned; None without one.

        Raises:
            ValueError: A gradient is sparse, or a parameter has gaps in its memory.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            params = [param for param in group["params"] if param.grad is not None]
            grads = [param.grad for param in params]
            where = _where(params, grads)
            plan = self._plans.get(index)
            if plan is None or plan.where != where or not self._has_state(plan, group, params):
                plan = self._plans[index] = self._plan(group, params, grads, where)
            beta1, beta2 = group["betas"]
            adamw(
                plan.params,
                [_flat_gradient(run, params, grads) for run in plan.runs],
                plan.moments[0],
                plan.moments[1],
                plan.moments[2],
                plan.steps,
                fused=True,
                grad_scale=getattr(self, "grad_scale", None),  # set by torch.amp.GradScaler
                found_inf=getattr(self, "found_inf", None),
                amsgrad=group["amsgrad"],
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
            )
            for counted in plan.counted:
                counted[1:].copy_(counted[0])
            plan.versions = [_version(counted) for counted in plan.counted]
        return loss

    def _has_state(
        self, plan: _Plan, group: dict[str, Any], params: Sequence[torch.Tensor]
    ) -> bool:
        """Whether the state of `params` is the plan's: nobody has replaced a tensor of it, or written a step, since."""
        held = self._held(params)
        return (
            plan.names == _names(group)
            and len(held) == len(plan.held)
            and all(map(is_, held, plan.held))
            and plan.versions == [_version(counted) for counted in plan.counted]
        )

    def _held(self, params: Sequence[torch.Tensor]) -> list[Any]:
        """All that is in the state of `params`."""
        states = [self.state.get(param, {}) for param in params]
        return list(chain.from_iterable(map(dict.values, states)))

    def _plan(
        self,
        group: dict[str, Any],
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        where: Sequence[object],
    ) -> _Plan:
        """Finds the runs, and makes the state of each run one tensor."""
        names = _names(group)
        plan = _Plan(where, names)
        steps = [float(self.state[param].get("step", 0)) for param in params]
        for param in params:
            if not _dense(param):
                raise ValueError(
                    f"AdamW: a parameter of shape {tuple(param.shape)} has strides {param.stride()}, with gaps in its "
                    "memory, which PyTorch's fused kernel would write into; pass a contiguous one"
                )
        for run in _runs(params, grads, steps):
            members = [params[i] for i in run]
            plan.runs.append(run)
            plan.params.append(_flat(members))
            counted = members[0].new_full((len(run),), steps[run[0]], dtype=torch.float32)
            plan.steps.append(counted[0])
            plan.counted.append(counted)
            for param, step in zip(members, counted, strict=True):
                self.state[param]["step"] = step
            for name, moments in zip(names[1:], plan.moments, strict=False):
                moments.append(self._flat_state(members, name))
        plan.held = self._held(params)
        return plan

    def _flat_state(self, params: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        """The state `name` of a run as one tensor: moved together where it lies apart, zeros where there is none."""
        held = [self.state[param].get(name) for param in params]
        if any(
            old is None or old.stride() != p.stride() for old, p in zip(held, params, strict=True)
        ) or not all(_follows(a, b) for a, b in pairwise(held)):
            flat = torch.zeros_like(_flat(params))
            offset = 0
            for i, (param, old) in enumerate(zip(params, held, strict=True)):
                held[i] = flat
                if len(params) > 1:
                    held[i] = flat.as_strided(param.shape, param.stride(), offset)
                if old is not None:
                    held[i].copy_(old)
                self.state[param][name] = held[i]
                offset += param.numel()
        return _flat(held)


@dataclass
class _Plan:
    """One group's runs. They are valid as long as parameters and gradients lie `where` they did; see `_where`.

    A run lists indices into the parameters with a gradient; the other lists have an entry for each run. The kernel
    counts the step of a run's first parameter, which is then copied to the others.
    """

    where: Sequence[object]
    names: list[str]
    runs: list[list[int]] = field(default_factory=list)
    params: list[torch.Tensor] = field(default_factory=list)
    moments: list[list[torch.Tensor]] = field(default_factory=lambda: [[], [], []])
    steps: list[torch.Tensor] = field(default_factory=list)
    counted: list[torch.Tensor] = field(default_factory=list)
    """The steps of all parameters of a run. They are views of it, and so a write to one changes its version."""
    versions: list[int] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    """All that the parameters have in `state`."""


def _names(group: dict[str, Any]) -> list[str]:
    """What the group's parameters have in `state`."""
    return ["step", *(MOMENTS if group["amsgrad"] else MOMENTS[:2])]


def _version(tensor: torch.Tensor) -> int:
    """How often the tensor was written to; it is not known of one that was made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _where(params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> list[object]:
    """What a plan depends on: where parameters are, and which gradients share a storage at which offsets.

    It does not depend on where that storage is, since on a GPU each step may have another one.
    """
    storages: dict[int, int] = {}  # numbered as they are met
    where: list[object] = []
    number = -1
    for param, grad in zip(params, grads, strict=True):
        if grad.layout is not torch.strided:
            raise ValueError(
                f"AdamW: a parameter of shape {tuple(param.shape)} has a {grad.layout} gradient; it must be dense: use "
                "torch.optim.SparseAdam for it"
            )
        offset = grad.storage_offset()
        if address := grad.data_ptr():  # else it is empty, and may count to the last storage
            number = storages.setdefault(int(address - offset * grad.itemsize), len(storages))
        where.append((id(param), param.data_ptr(), number, offset, grad.stride()))
    return where


def _runs(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], steps: Sequence[float]
) -> Iterator[list[int]]:
    """Indices of parameters that follow each other in memory, as their gradients do, and are at the same step."""

    def position(i: int) -> tuple[int, int, int]:
        param = params[i]
        return param.untyped_storage().data_ptr(), int(param.storage_offset()), param.numel()

    run: list[int] = []
    for i in sorted(range(len(params)), key=position):
        if run and not (
            steps[run[-1]] == steps[i]
            and _follows(params[run[-1]], params[i])
            and _follows(grads[run[-1]], grads[i])
            and all(params[j].stride() == grads[j].stride() for j in (run[-1], i))
        ):
            yield run
            run = []
        run.append(i)
    if run:
        yield run


def _follows(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether `after` begins where `before` ends, and both fill their memory."""
    return (
        before.dtype == after.dtype
        and before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        and before.storage_offset() + before.numel() == after.storage_offset()
        and _dense(before)
        and _dense(after)
    )


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill one range of memory, in whatever order of dims."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _flat(run: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors that follow each other as one flat tensor; a single tensor is returned as it is."""
    if len(run) == 1:
        return run[0]
    return run[0].as_strided((sum(map(torch.numel, run)),), (1,))


def _flat_gradient(
    run: Sequence[int], params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The gradients of a run as one tensor.

    The gradient of a single parameter gets its parameter's strides, since the kernel goes through both in the order of
    memory.
    """
    flat = _flat([grads[i] for i in run])
    if len(run) > 1 or flat.stride() == params[run[0]].stride():
        return flat
    return torch.empty_like(params[run[0]]).copy_(flat)
