"""`loss.backward(inputs=params)` and `torch.autograd.grad(loss, params, allow_unused=True)`: both refused.

They would leave no gradient at all: autograd's own leaves are the full parameters. Autograd asks no Python of its
inputs, so that what `torch.autograd.backward` and `torch.autograd.grad` call is wrapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, wraps
from typing import Any

import torch

from shardcomm.parameter.sharded_parameter import ShardedParameter
from shardcomm.parameter.whole_parameter import WholeParameter


@cache
def install() -> None:
    """Wraps the function by which torch.autograd runs a backward, once in the process."""
    run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @wraps(run)
    def checked(
        outputs: Any,
        gradients: Any,
        keep_graph: Any,
        create_graph: Any,
        inputs: Sequence[Any] = (),
        *args: Any,
        accumulate_grad: bool = False,
        **kwargs: Any,
    ) -> Any:
        ours = [
            (index, each.whole)
            for index, each in enumerate(inputs)
            if isinstance(each, ShardedParameter | WholeParameter) and each.whole is not None
        ]
        if ours and accumulate_grad:
            ours[0][1].refuse_backward_inputs()
        try:
            found = run(
                outputs,
                gradients,
                keep_graph,
                create_graph,
                inputs,
                *args,
                accumulate_grad=accumulate_grad,
                **kwargs,
            )
        except RuntimeError as error:
            if ours and "appears to not have been used" in str(error):
                ours[0][1].refuse_autograd_grad()
            raise
        for index, whole in ours:
            if found[index] is None:
                whole.refuse_autograd_grad()
        return found

    torch.autograd._engine_run_backward = checked  # type: ignore[attr-defined, assignment]
