"""Which addresses of this host somebody listens at, as the kernel tells it."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from pathlib import Path

_LISTEN = "0A"


def listening(port: int | None = None) -> list[str]:
    """The addresses at which `port` is open; without one, all at which this process listens."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except FileNotFoundError:  # what lists them
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = line.split()
            inode = line.split()[9]
            address, at = local.split(":")
            if state == _LISTEN and (
                int(at, 16) == port if port is not None else f"socket:[{inode}]" in own
            ):
                found.append(str(_address(address)))
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Of the kernel's form: words of the machine's byte order, in hexadecimal."""
    words = [bytes.fromhex(text[i : i + 8]) for i in range(0, len(text), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return ipaddress.ip_address(socket.inet_ntop(family, packed))
