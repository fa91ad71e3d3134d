"""Strategies for Lightning: `ShardcommStrategy` for Fabric, `ShardcommTrainerStrategy` for the Trainer.

    from shardcomm.interop.lightning import ShardcommStrategy, ShardcommTrainerStrategy
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ShardcommStrategy(units=Block))
    trainer = Trainer(accelerator="cpu", devices=2, strategy=ShardcommTrainerStrategy(units=Block))

They are two classes, as Lightning's own strategies are, since Fabric and the Trainer take two kinds. Either shards the
model by `shardcomm.fully_shard`; what they have in common is in `shards.py`. Only this package imports `lightning`.
"""

try:
    import lightning  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    raise ModuleNotFoundError(
        "shardcomm.interop.lightning needs the package lightning: pip install lightning (which is not "
        "pytorch-lightning, whose classes are others)",
        name="lightning",
    ) from None

from shardcomm.interop.lightning.fabric import ShardcommStrategy
from shardcomm.interop.lightning.trainer import ShardcommTrainerStrategy

__all__ = ["ShardcommStrategy", "ShardcommTrainerStrategy"]
