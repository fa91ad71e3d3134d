"""Hugging Face models, sharded over 2 ranks and not: parameters after 4 steps, tokens generated, time of a step.

    bitwise     every parameter is bit for bit that of the model trained unsharded on the same batches
    a number    otherwise: the largest difference of any number in any parameter (limit: 1e-5)

Where several units read the same value, as decoder layers read what an encoder gives, its gradient is summed unit by
unit, and so in another order than unsharded.

Models are small, built from configs: nothing is downloaded. Every rank trains on batches of its own, by SGD with
momentum, which unlike Adam shows a gradient's scale; the unsharded model trains on those of both. Units are what
`fully_shard` takes by itself, the entries of ModuleLists. "recomputed" is after `gradient_checkpointing_enable()`.
Models that write are asked for 8 tokens after training, by `engine.register_forward_method(model, "generate")`; they
must be those of the unsharded one. LoRA's adapters are merged after training, inside of `engine.gathered(write=True)`.
Times are of steps 2 to 4 on a rank. The unsharded model does the work of both ranks, at the same time on both.

It needs transformers and peft (pip install transformers peft); without them it says so and ends.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from harness import Bound, Report, Times, arguments
from torch import nn

import shardcomm

RANKS = 2
STEPS = 4
BATCH, LENGTH, VOCAB, WIDTH = 2, 12, 96, 32
LIMIT = 1e-5
NEEDED = ("transformers", "peft")

DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**DECODER))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            **DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
        )
    )


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **DECODER,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            output_router_logits=True,
        )
    )


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            num_hidden_layers=3,
            state_size=4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
        )
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=WIDTH,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=None,
        )
    )


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCAB,
            d_model=WIDTH,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_mel_bins=8,
            max_source_positions=LENGTH,
            max_target_positions=32,
            decoder_start_token_id=1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=VOCAB - 1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            num_labels=5,
        )
    )


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(llama(), config)
    assert isinstance(model, nn.Module)
    return model


Batch = dict[str, torch.Tensor]


def text(generator: torch.Generator) -> Batch:
    tokens = torch.randint(2, VOCAB - 1, (BATCH, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def speech(generator: torch.Generator) -> Batch:
    sound = torch.randn(BATCH, 8, 2 * LENGTH, generator=generator)
    return {"input_features": sound, "labels": text(generator)["labels"]}


def images(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator),
        "labels": torch.randint(5, (BATCH,), generator=generator),
    }


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch] = text
    prompt: str | None = "input_ids"
    """Which input `generate` begins with, if the model writes."""


CASES = {
    "Llama": Case(llama),
    "Mixtral": Case(mixtral),
    "Qwen3-MoE": Case(qwen3_moe),
    "Mamba": Case(mamba),
    "T5": Case(t5),
    "Whisper": Case(whisper, speech, "input_features"),
    "ViT": Case(vit, images, None),
    "Llama with LoRA": Case(lora),
}


@dataclass(frozen=True)
class Outcome:
    """What one rank found."""

    units: int
    difference: float
    same_tokens: bool | None  # None: it writes none
    seconds: tuple[float, ...]
    unsharded_seconds: tuple[float, ...]


def train(model: nn.Module, batches: Iterator[list[Batch]]) -> tuple[float, ...]:
    """Seconds of each step but the first. The gradient is the mean over a step's batches."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    seconds = []
    for step in batches:
        start = time.perf_counter()
        for batch in step:
            (model(**batch).loss / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return tuple(seconds[1:])


def write(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    model.eval()
    tokens = model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert isinstance(tokens, torch.Tensor)
    return tokens


def quieten() -> None:
    """Says nothing of what is deprecated, or slower without other packages."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def compare(name: str, recompute: bool) -> Outcome:
    """Trains both models on this rank."""
    quieten()
    torch.set_num_threads(1)
    case = CASES[name]
    comm = shardcomm.Communicator.from_env()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model: Any = case.make().train()
        if recompute:
            model.gradient_checkpointing_enable()
        models.append(model)
    plain, model = models

    def batches(step: int) -> list[Batch]:
        return [case.batch(torch.Generator().manual_seed(RANKS * step + r)) for r in range(RANKS)]

    unsharded_seconds = train(plain, (batches(step) for step in range(STEPS)))
    engine = shardcomm.fully_shard(model, comm)
    seconds = train(model, ([batches(step)[comm.rank]] for step in range(STEPS)))
    same_tokens = None
    if case.prompt is not None:
        engine.register_forward_method(model, "generate")
        prompt = batches(STEPS)[0][case.prompt]
        same_tokens = torch.equal(write(model, prompt), write(plain, prompt))
    if hasattr(model, "merge_adapter"):
        with engine.gathered(write=True):
            model.merge_adapter()
        plain.merge_adapter()
    full = engine.full_state_dict()
    difference = max(
        float((full[key] - value).abs().max()) if value.numel() else 0.0
        for key, value in plain.state_dict().items()
    )
    engine.close()
    comm.close()
    return Outcome(len(engine.units), difference, same_tokens, seconds, unsharded_seconds)


def main() -> None:
    args = arguments(__doc__).parse_args()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        needs, install = " and ".join(missing), " ".join(missing)
        print(f"skipped: needs {needs}: pip install {install}", file=sys.stderr)
        return
    columns = ["model", "", "units", "difference", "tokens", "step", "step, unsharded"]
    report = Report(columns)
    report.figures["versions"] = {name: version(name) for name in NEEDED}
    for name in CASES:
        for recompute in (False, True):
            ranks = shardcomm.launch(compare, RANKS, (name, recompute), timeout_s=300)
            difference = max(rank.difference for rank in ranks)
            times = Times(tuple(s for rank in ranks for s in rank.seconds))
            unsharded = Times(tuple(s for rank in ranks for s in rank.unsharded_seconds))
            same = {rank.same_tokens for rank in ranks}  # {None}: it writes none
            row = f"{name}, recomputed" if recompute else name
            report.row(
                name,
                "recomputed" if recompute else "",
                ranks[0].units,
                "bitwise" if difference == 0 else f"{difference:.1e}",
                "-" if same == {None} else "the same" if same == {True} else "OTHERS",
                times,
                unsharded,
            )
            report.figures[row] = {
                "difference": difference,
                "same_tokens": None if same == {None} else same == {True},
                "step_s": times.median,
                "unsharded_step_s": unsharded.median,
            }
            report.bounds.append(Bound(f"{row}: difference", difference, at_most=LIMIT))
            if same != {None}:
                report.bounds.append(
                    Bound(f"{row}: same tokens", float(same == {True}), at_least=1)
                )
    report.finish(args)


if __name__ == "__main__":
    main()
