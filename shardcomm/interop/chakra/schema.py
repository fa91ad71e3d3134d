"""Chakra's messages, as protobuf encodes them: its schema's fields that a step needs, by their numbers.

Source: mlcommons/chakra, schema/protobuf/et_def.proto of version 1.0.0 (commit 21585d8).
"""

from __future__ import annotations

from typing import Any

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ImportError as error:
    raise ImportError(
        "shardcomm.interop.chakra needs protobuf: pip install 'shardcomm[chakra]'", name=error.name
    ) from error

VERSION = "1.0.0"

COMP_NODE, COMM_COLL_NODE = 4, 7  # of the enum NodeType
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = 0, 2, 7  # of the enum CollectiveCommType

_Field = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "ChakraProtoMsg"
_ATTRIBUTES = f".{_PACKAGE}.AttributeProto"

# An enum is an int32 on the wire. Attributes have one of many values; those that are not used here are left out.
_MESSAGES: dict[str, list[tuple[str, int, int, bool]]] = {
    "AttributeProto": [
        ("name", 1, _Field.TYPE_STRING, False),
        ("int64_val", 9, _Field.TYPE_INT64, False),
        ("uint64_val", 13, _Field.TYPE_UINT64, False),
        ("bool_val", 27, _Field.TYPE_BOOL, False),
        ("string_val", 29, _Field.TYPE_STRING, False),
    ],
    "GlobalMetadata": [
        ("version", 1, _Field.TYPE_STRING, False),
        ("attr", 2, _Field.TYPE_MESSAGE, True),
    ],
    "Node": [
        ("id", 1, _Field.TYPE_UINT64, False),
        ("name", 2, _Field.TYPE_STRING, False),
        ("type", 3, _Field.TYPE_INT32, False),
        ("data_deps", 5, _Field.TYPE_UINT64, True),
        ("start_time_micros", 6, _Field.TYPE_UINT64, False),
        ("duration_micros", 7, _Field.TYPE_UINT64, False),
        ("attr", 10, _Field.TYPE_MESSAGE, True),
    ],
}
_VALUES = "value"  # the oneof of an attribute's value, which says that false and 0 are values too


def _messages() -> dict[str, Any]:
    """The classes of `_MESSAGES`, in a pool of their own: Chakra's module of the same messages may be imported, too."""
    file = descriptor_pb2.FileDescriptorProto(
        name="et_def.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name=_VALUES)
        for field, number, kind, repeated in fields:
            added = message.field.add(name=field, number=number, type=kind)
            added.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            if kind == _Field.TYPE_MESSAGE:
                added.type_name = _ATTRIBUTES
            if field.endswith("_val"):
                added.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _messages()
Attribute, GlobalMetadata, Node = (_CLASSES[name] for name in _MESSAGES)


def delimited(message: Any) -> bytes:
    """The message after its length as a varint, which is how an execution trace strings messages together."""
    encoded: bytes = message.SerializeToString()
    length, varint = len(encoded), bytearray()
    while length > 0x7F:
        varint.append(length & 0x7F | 0x80)
        length >>= 7
    varint.append(length)
    return bytes(varint) + encoded
