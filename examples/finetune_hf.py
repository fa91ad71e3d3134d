"""A Hugging Face model, its decoder layers sharded over all ranks: trained, asked, and saved in its own format.

pip install transformers
torchrun --nproc-per-node 2 examples/finetune_hf.py [FOLDER TO SAVE IN]
"""

import sys

import torch

import shardcomm

try:
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
except ModuleNotFoundError:
    sys.exit("This example needs transformers: pip install transformers")


def main(folder: str | None = None, steps: int = 20) -> list[float]:
    """Fine-tunes on one sentence; returns the losses, the same on every rank."""
    comm = shardcomm.Communicator.from_env()
    torch.manual_seed(0)
    # Built from a config, so that nothing is downloaded; with weights: AutoModelForCausalLM.from_pretrained(...).
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).to(comm.device)
    engine = shardcomm.fully_shard(model, comm, units=LlamaDecoderLayer)
    optimizer = shardcomm.AdamW(model.parameters(), lr=3e-3)

    sentence = torch.tensor([list(b"one line shards the model. ")], device=comm.device)
    losses = []
    for _ in range(steps):
        # Every rank has its own part of the batch: here, the sentence begun elsewhere.
        tokens = sentence.roll(comm.rank, dims=1)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        comm.all_reduce(mean, "avg")
        losses.append(mean.item())

    model.eval()
    # All ranks generate together, since they gather each layer together.
    asked = model.generate(sentence[:, :5], max_new_tokens=22, do_sample=False, pad_token_id=0)
    state = engine.full_state_dict()
    if comm.rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; it says: {bytes(asked[0].tolist())!r}")
        if folder is not None:
            model.save_pretrained(folder, state_dict=state)
    engine.close()
    comm.close()
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
