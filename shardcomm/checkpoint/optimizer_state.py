"""An optimizer's state as `torch.distributed.checkpoint` (DCP) saves and loads it: by the parameters' names.

The form is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, so that FSDP2 and plain models
read it, and this reads theirs::

    {"state": {"head.weight": {"step": ..., "exp_avg": ShardTensor, ...}, ...},
     "param_groups": [{"lr": 0.001, ..., "params": ["head.weight", ...]}]}
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn

from shardcomm.arguments.checks import check_type
from shardcomm.checkpoint.elsewhere import Elsewhere
from shardcomm.parameter.optimizer_dicts import ParamState
from shardcomm.parameter.plain import plain
from shardcomm.parameter.shard_tensor import check_value, load_value


class OptimizerState:
    """The state of an optimizer of a sharded model, as a `Stateful` of DCP. `Engine.optimizer_state` makes it.

    A tensor that has the shape of this rank's rows, such as AdamW's moments, is saved as rows of the full tensor. A
    tensor of another shape, such as Adafactor's means of rows and columns, can be saved where the rank holds the whole
    parameter. Numbers, such as a step counter, must be the same on every rank.

    Raises:
        TypeError: `optimizer` is no torch Optimizer.
        ValueError: The optimizer has a parameter that is not one of `model`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, elsewhere: Elsewhere
    ) -> None:
        check_type(
            "optimizer_state", "optimizer", optimizer, torch.optim.Optimizer, "a torch Optimizer"
        )
        self._optimizer = optimizer
        self._elsewhere = elsewhere
        self._names = {param: name for name, param in model.named_parameters()}
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if param not in self._names:
                    raise ValueError(
                        f"optimizer_state: group {number} of the optimizer has a parameter of shape "
                        f"{tuple(param.shape)} that is none of the model's; make the optimizer of "
                        "model.parameters() after fully_shard"
                    )

    def state_dict(self) -> dict[str, Any]:
        """Views of the optimizer's state, which DCP reads and writes.

        Parameters that have no state yet and are not frozen first get that with which they begin, so that there is
        something to load into. If ranks have other experts, this is collective, since each rank names the experts of
        all ranks in the groups.

        DCP refuses to load a parameter's state that is not in the checkpoint, such as that of a parameter that was
        frozen. Then give DCP `planner=DefaultLoadPlanner(allow_partial_load=True)`.

        Raises:
            ValueError: A state that has not the shape of the rows belongs to a parameter whose rows ranks share, or
                ranks have other numbers of groups.
        """
        self._make_missing_state({param for param, _ in self._held() if param.requires_grad})
        groups = self._optimizer.param_groups
        return {
            "state": {
                self._names[param]: _shown(of, self._optimizer.state[param])
                for param, of in self._held()
                if param in self._optimizer.state
            },
            "param_groups": [
                {**group, "params": names}
                for group, names in zip(
                    groups, self._elsewhere.on_all([*map(self._of_group, groups)]), strict=True
                )
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads this rank's part of an optimizer's state. No communication.

        Parameters without an entry in `state_dict` have no state afterwards.

        Args:
            state_dict: What `state_dict()` gave, or the same with full tensors.

        Raises:
            ValueError: `state_dict` is of other parameters, groups them otherwise, or has a value of another shape;
                no value is changed then.
        """
        self._check_groups(state_dict["param_groups"])
        given_state = state_dict["state"]
        self._make_missing_state({p for p, _ in self._held() if self._names[p] in given_state})
        for param, of in self._held():
            name = self._names[param]
            current = _shown(of, self._optimizer.state.get(param, {}))
            for key, value in given_state.get(name, {}).items():
                if isinstance(current.get(key), torch.Tensor):
                    check_value("load_state_dict", f"{key} of {name}", current[key], value)
        for param, of in self._held():
            name = self._names[param]
            if name not in given_state:
                self._optimizer.state.pop(param, None)
                continue
            state = self._optimizer.state[param]
            current = _shown(of, state)
            for key, value in given_state[name].items():
                if isinstance(current.get(key), torch.Tensor):
                    load_value(current[key], value)
                else:
                    state.update({key: value} if of is None else of.taken({key: value}))
        for group, given in zip(
            self._optimizer.param_groups, state_dict["param_groups"], strict=True
        ):
            group.update({key: value for key, value in given.items() if key != "params"})

    def _of_group(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[param] for param in group["params"]]

    def _held(self) -> Iterator[tuple[nn.Parameter, ParamState | None]]:
        """The optimizer's parameters, without those whose whole state another rank has."""
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                of = ParamState.of(param)
                if of is None or not of.part.elsewhere:
                    yield param, of

    def _make_missing_state(self, of: Set[nn.Parameter]) -> None:
        """Makes the state with which the first step begins of those that have none; parameters stay the same."""
        probe = copy.copy(self._optimizer)  # without what it has besides torch's attributes
        for name, value in vars(self._optimizer).items():
            if name == "step" or name in vars(
                probe
            ):  # a scheduler of torch's binds `step` to the optimizer itself
                continue
            if isinstance(value, torch.optim.Optimizer):
                kind = type(self._optimizer).__name__
                raise RuntimeError(
                    f"the state of {kind} before its first step: its {name} is an optimizer too, which would make a "
                    f"step of its own; save and load the state of {kind}.{name}, or call this after a step"
                )
            vars(probe)[name] = copy.copy(value) if isinstance(value, dict | list | set) else value
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param not in of or self._optimizer.state.get(param):
                    continue
                with plain():
                    zeros = torch.zeros_like(param)
                stand_in = nn.Parameter(zeros)
                stand_in.grad = zeros.clone()
                probe.state = defaultdict(dict)
                probe.param_groups = [{**group, "params": [stand_in]}]
                probe.step()
                if stand_in in probe.state:
                    state = self._optimizer.state[param] = probe.state[stand_in]
                    _set_back(state, group, averages=isinstance(probe, _AVERAGING))

    def _check_groups(self, given: list[dict[str, Any]]) -> None:
        saved = [set(group["params"]) for group in given]
        own = [set(self._of_group(group)) for group in self._optimizer.param_groups]
        if [names - self._elsewhere.names for names in saved] != own:
            differing = sorted(set().union(*saved) ^ set().union(*own))
            what = f"only one of them has {differing[:3]}" if differing else "groups differ"
            raise ValueError(
                f"load_state_dict: the state is of {len(saved)} parameter groups with {sum(map(len, saved))} "
                f"parameters, the optimizer has {len(own)} with {sum(map(len, own))}, and {what}; make the "
                "optimizer as the saved one was"
            )


def _shown(of: ParamState | None, state: dict[str, Any]) -> dict[str, Any]:
    return state if of is None else of.shown(state)


# The optimizers whose state has the averages' weights. Others may have something else by these names.
_AVERAGING = torch.optim.ASGD, torch.optim.NAdam


def _set_back(state: dict[str, Any], group: Mapping[str, Any], *, averages: bool) -> None:
    """Gives the numbers in `state`, after a step without a gradient, the values that they have before that step."""
    numbers: dict[str, Any] = {"step": 0}
    if averages:
        numbers |= {"mu": 1, "mu_product": 1, "eta": group["lr"]}
    for key in state.keys() & numbers.keys():
        value = state[key]
        if isinstance(value, (int, float)):
            state[key] = type(value)(numbers[key])
        elif isinstance(value, torch.Tensor) and value.dim() == 0:
            value.fill_(numbers[key])
