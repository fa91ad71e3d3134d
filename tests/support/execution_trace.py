"""Reads Chakra's execution traces, with nothing of what writes them.

Source: https://protobuf.dev/programming-guides/encoding, and et_def.proto of mlcommons/chakra.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

COMP_NODE, COMM_COLL_NODE = 4, 7
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = 0, 2, 7


@dataclass
class Node:
    id: int
    name: str
    type: int
    needs: list[int]
    start_us: int
    duration_us: int
    attributes: dict[str, int | str]


def read(path: Path) -> tuple[str, list[Node]]:
    """The version that the trace states, and its nodes."""
    version, *nodes = list(_messages(path.read_bytes()))
    return _last(version, 1, b"").decode(), [_node(fields) for fields in nodes]


Fields = list[tuple[int, int | bytes]]


def _messages(data: bytes) -> Iterator[Fields]:
    """Messages, each after its length."""
    at = 0
    while at < len(data):
        length, at = _varint(data, at)
        yield _fields(data[at : at + length])
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


def _fields(data: bytes) -> Fields:
    found: Fields = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        value: int | bytes
        if tag & 7 == 0:
            value, at = _varint(data, at)
        else:
            assert tag & 7 == 2, f"wire type {tag & 7}"
            length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
        found.append((tag >> 3, value))
    return found


def _node(fields: Fields) -> Node:
    needs: list[int] = []
    for packed in _all(fields, 5):
        assert isinstance(packed, bytes)
        at = 0
        while at < len(packed):
            need, at = _varint(packed, at)
            needs.append(need)
    attributes: dict[str, int | str] = {}
    for attribute in _all(fields, 10):
        assert isinstance(attribute, bytes)
        (_, name), (number, value) = _fields(attribute)
        assert isinstance(name, bytes)
        assert number in (9, 13, 27, 29)  # int64_val, uint64_val, bool_val, string_val
        attributes[name.decode()] = value.decode() if isinstance(value, bytes) else value
    numbers = [_last(fields, number, 0) for number in (1, 3, 6, 7)]
    return Node(
        numbers[0], _last(fields, 2, b"").decode(), numbers[1], needs, *numbers[2:], attributes
    )


def _all(fields: Fields, number: int) -> list[int | bytes]:
    return [value for each, value in fields if each == number]


T = TypeVar("T", int, bytes)


def _last(fields: Fields, number: int, default: T) -> T:
    value = (_all(fields, number) or [default])[-1]
    assert isinstance(value, type(default))
    return value
