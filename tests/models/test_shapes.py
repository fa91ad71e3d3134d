"""The shapes of well-known models: how many parameters they were published with, and modules that have them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardcomm.models.shapes import SHAPES, equal_blocks

PUBLISHED = {"gpt2": 124_439_808, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496}


def test_known_models_have_the_published_size() -> None:
    assert {name: shapes.numel for name, shapes in SHAPES.items()} == PUBLISHED


@pytest.mark.parametrize(
    ("name", "layers", "lookup"),
    [
        ("gpt2", 12, "wpe"),
        ("llama3-8b", 32, "tok_embeddings"),
        ("llama3-70b", 80, "tok_embeddings"),
    ],
)
def test_their_modules_have_them_and_take_no_memory(name: str, layers: int, lookup: str) -> None:
    model = SHAPES[name].on_meta()
    params = list(model.parameters())
    assert sum(param.numel() for param in params) == PUBLISHED[name]
    assert {(param.device.type, param.dtype) for param in params} == {("meta", torch.float32)}
    assert len(model.get_submodule("blocks")._modules) == layers
    assert [n for n, each in model.named_modules() if isinstance(each, nn.Embedding)] == [lookup]
    with pytest.raises(NotImplementedError, match="these are shapes only"):
        model()


@pytest.mark.parametrize(("numel", "layers"), [(12, 4), (1_000_003, 7), (3, 4)])
def test_equal_blocks_lose_no_parameter(numel: int, layers: int) -> None:
    shapes = equal_blocks(numel, layers)
    assert (shapes.numel, shapes.layers) == (numel, layers)
