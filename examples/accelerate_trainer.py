"""Trainer of Hugging Face's transformers over shardcomm: DDP over its backend, or a model that the engine has sharded.

pip install accelerate transformers
torchrun --nproc-per-node 2 examples/accelerate_trainer.py ddp
torchrun --nproc-per-node 2 examples/accelerate_trainer.py engine [FOLDER TO SAVE IN]
"""

import sys
import tempfile

import torch
import torch.distributed as dist

import shardcomm

try:
    from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from shardcomm.interop.accelerate import prepared
except ModuleNotFoundError as error:
    sys.exit(f"This example needs accelerate and transformers: {error}")


class SavesWhole(Trainer):
    """A Trainer of a model that an engine has sharded. Every rank gathers what the main process saves."""

    def save_model(self, output_dir=None, _internal_call=False):
        weights = self.engine.full_state_dict(rank=0)  # outside of the if: it is collective
        if self.args.should_save:
            self.model.save_pretrained(output_dir or self.args.output_dir, state_dict=weights)


def main(kind: str = "engine", folder: str | None = None) -> list[float]:
    """Trains on one sentence; returns the losses of the steps."""
    # accelerate takes Gloo for ranks on CPUs, unless there is a process group already.
    dist.init_process_group("shardcomm")
    args = TrainingArguments(
        output_dir=folder or tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=10,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        logging_steps=1,
        save_only_model=True,  # the Trainer saves the optimizer on one rank
        disable_tqdm=True,
        report_to=[],
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.tensor(list(b"one line shards the model. "))
    data = [{"input_ids": tokens.roll(i), "labels": tokens.roll(i)} for i in range(64)]
    if kind == "engine":
        comm = shardcomm.Communicator.from_process_group()
        engine = shardcomm.fully_shard(model, comm, units=LlamaDecoderLayer)
        prepared(engine)  # so that the Trainer takes the model as it is
        trainer = SavesWhole(model, args, train_dataset=data)
        trainer.engine = engine
    else:
        trainer = Trainer(model, args, train_dataset=data)
    trainer.train()
    trainer.save_model()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(
            f"{kind}, a {type(trainer.model_wrapped).__name__}: {losses[0]:.3f} -> {losses[-1]:.3f}"
        )
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
