"""A small transformer in JAX, fully sharded: a layer is gathered where it is used, and its gradient is reduced.

It trains beside the same model unsharded, over 2 processes or as many as one says:

python examples/jax_fsdp.py 4
"""

import sys
import time
from functools import partial

import jax
import jax.numpy as jnp

import shardcomm
from shardcomm import Layout, ParamSpec
from shardcomm.jax import XlaCommunicator, all_gather, all_reduce

WIDTH, HEADS, LAYERS, VOCAB, TOKENS, BATCH, STEPS, RATE = 64, 4, 2, 96, 32, 4, 16, 0.5
ENDS = {"embedding": (VOCAB, WIDTH), "positions": (TOKENS, WIDTH), "head": (WIDTH, VOCAB)}
UP, DOWN = (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
LAYER = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": UP, "down": DOWN, "bias": (WIDTH,)}


def plan(ranks):
    """Where the parameters of each unit lie in its flat buffer, and which part of that a rank holds."""
    units = [ENDS, *[LAYER] * LAYERS]
    return [Layout.plan([ParamSpec(*named) for named in unit.items()], ranks) for unit in units]


def parameters(layout, flat):
    placed = layout.placements
    return {p.spec.name: flat[p.offset :][: p.numel].reshape(p.spec.shape) for p in placed}


def norm(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def block(params, x):
    q, k, v = jnp.split((norm(x) @ params["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
    seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + seen.reshape(x.shape) @ params["out"]
    return x + jax.nn.gelu(norm(x) @ params["up"]) @ params["down"] + params["bias"]


def loss(held, tokens, layouts, gather):
    """`gather` makes a unit's flat buffer of what is held of it: forward calls it, and backward once more."""
    ends = parameters(layouts[0], gather(held[0]))
    x = ends["embedding"][tokens[:, :-1]] + ends["positions"]
    for layout, layer in zip(layouts[1:], held[1:], strict=True):
        x = jax.checkpoint(lambda w, x, at=layout: block(parameters(at, gather(w)), x))(layer, x)
    logits = jax.nn.log_softmax(norm(x) @ ends["head"])
    return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()


@partial(jax.jit, static_argnames=("layouts", "gather", "mean", "ranks"), donate_argnames="held")
def step(held, tokens, *, layouts, gather, mean, ranks):
    """Gradients are sums over ranks, and the loss is the mean of each."""
    value, grads = jax.value_and_grad(loss)(held, tokens, layouts, gather)
    return [h - RATE / ranks * g for h, g in zip(held, grads, strict=True)], mean(value)


def unchanged(x):
    return x


def main():
    """Returns the losses, sharded and not, and the largest difference of a parameter in the end."""
    with shardcomm.Communicator.from_env() as ranks, XlaCommunicator(ranks) as comm:
        layouts, random = tuple(plan(comm.size)), jax.random.key(0)
        full = [jax.random.normal(random, layout.flat_numel) * 0.1 for layout in layouts]
        shards = [flat.reshape(comm.size, -1)[comm.rank] for flat in full]
        gather, mean = partial(all_gather, comm=comm), partial(all_reduce, comm=comm, op="avg")
        losses = []
        for _ in range(STEPS):
            random, key = jax.random.split(random)
            first, stride = jax.random.randint(key, (2, comm.size, BATCH, 1), 1, VOCAB)
            tokens = (first + stride * jnp.arange(TOKENS + 1)) % VOCAB  # [rank, row, position]
            start = time.perf_counter()
            of_ranks = {"layouts": layouts, "gather": gather, "mean": mean, "ranks": comm.size}
            shards, mine = jax.block_until_ready(step(shards, tokens[comm.rank], **of_ranks))
            seconds = time.perf_counter() - start
            alone = {"layouts": layouts, "gather": unchanged, "mean": unchanged, "ranks": 1}
            full, expected = step(full, tokens.reshape(-1, TOKENS + 1), **alone)
            losses.append((float(mine), float(expected)))
            if comm.rank == 0:
                print(f"loss {mine:.6f}, unsharded {expected:.6f}; {seconds * 1e3:.1f} ms")
        mine_of = (flat.reshape(comm.size, -1)[comm.rank] for flat in full)
        return losses, max(float(abs(a - b).max()) for a, b in zip(shards, mine_of, strict=True))


if __name__ == "__main__":
    results = shardcomm.launch(main, int(sys.argv[1]) if sys.argv[1:] else 2)
    print(f"largest difference of a parameter: {max(apart for _, apart in results):.1e}")
