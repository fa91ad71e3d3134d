"""An FSDP loop written by hand: on torch's collectives as it was, then on `Bucket`; and the time of both.

torchrun --nproc-per-node 2 examples/handwritten_fsdp.py
"""

import time

import torch
import torch.distributed as dist
from torch.nn.functional import gelu, linear

from shardcomm import AdamW, Bucket, Communicator, Layout, ParamSpec

WIDTH, LAYERS, BATCH, STEPS = 768, 4, 16, 6
SHAPES = {"up": (2 * WIDTH, WIDTH), "bias": (2 * WIDTH,), "down": (WIDTH, 2 * WIDTH)}
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch < 2.13
reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def mlp(x, up, bias, down):
    return linear(gelu(linear(x, up, bias)), down)


class ByHand:
    """Before: a layer's shard, and views of `full` as its parameters; `Bucket` has the same methods."""

    def __init__(self, tensors, full):
        torch.cat([tensor.flatten() for tensor in tensors], out=full)
        self.full, self.shards = full, [full.chunk(dist.get_world_size())[dist.get_rank()].clone()]
        parts = full.split([tensor.numel() for tensor in tensors])
        self.params = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]

    def all_gather(self, *, async_op):  # fills params
        return gather(self.full, self.shards[0], async_op=async_op)

    def reduce_scatter(self, grads, *, async_op):  # averages into the .grad of shards
        self.shards[0].grad = torch.empty_like(self.shards[0])
        flat = torch.cat([grad.flatten() for grad in grads]) / dist.get_world_size()
        return reduce(self.shards[0].grad, flat, async_op=async_op)


def gathered(layers):
    """Each layer when its parameters are there; the next one is gathered meanwhile."""
    work = layers[0].all_gather(async_op=True)
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        work.wait()
        work = following and following.all_gather(async_op=True)
        yield layer


def step(layers, x):
    """Forward and backward, for either; backward recomputes from the inputs that forward kept."""
    inputs, reduces = [], []
    for layer in gathered(layers):
        inputs.append(x)
        x = mlp(x, *layer.params)
    loss, grad = (x - 1).square().mean(), (x - 1) * (2 / x.numel())
    for layer in gathered(layers[::-1]):
        leaves = [t.detach().requires_grad_() for t in (inputs.pop(), *layer.params)]
        grad, *grads = torch.autograd.grad(mlp(*leaves), leaves, grad)
        reduces.append(layer.reduce_scatter(grads, async_op=True))
    for work in reduces:
        work.wait()
    return loss


def main():
    """Prints the time of a step and returns the last loss, of each."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tensors = [[torch.randn(shape) * 0.03 for shape in SHAPES.values()] for _ in range(LAYERS)]
    # Neighbours take turns with two full buffers. (The world size must divide their length; a Bucket pads.)
    full = [torch.empty(sum(t.numel() for t in tensors[0])) for _ in range(2)]
    before = [ByHand(layer, full[i % 2]) for i, layer in enumerate(tensors)]
    comm = Communicator.from_process_group()
    layout = Layout.plan([ParamSpec(*named) for named in SHAPES.items()], comm.size)
    *full, grads = (comm.allocate(layout.flat_numel, use=u) for u in ("gather", "gather", "reduce"))
    after = [Bucket(layout, comm, full_buffer=f, reduce_buffer=grads) for f in full * (LAYERS // 2)]
    for bucket, layer in zip(after, tensors, strict=True):
        bucket.load(layer)
    losses = {}
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for name, layers in {"by hand": before, "on Bucket": after}.items():
        optimizer = AdamW([shard for layer in layers for shard in layer.shards])
        start = time.perf_counter()
        for _ in range(STEPS):
            losses[name] = step(layers, x).item()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - start
            print(f"{name:9}  {seconds / STEPS * 1e3:6.1f} ms a step, loss {losses[name]:.6f}")
    comm.close()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
