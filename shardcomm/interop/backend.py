"""The `shardcomm` backend of torch.distributed: its collectives on CPU tensors, through shared memory.

    torch.distributed.init_process_group("shardcomm")  # or "cpu:shardcomm,cuda:nccl"

Everything that a program then does through torch.distributed (FSDP, DDP, DTensor, collectives by hand) uses it, without
a change to the program. It is a `c10d::Backend` as torch's own are, in C++, over the C library; the files are in
csrc/torch. They are compiled against the torch that is installed when a machine first makes a group, and kept.

Over several hosts, what moves shards takes the transport `hosts`, and the rest goes to Gloo. If ranks cannot share
memory, everything goes to Gloo. `receipts` says which way each collective went, and why.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sysconfig
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

import shardcomm_autoload
from shardcomm._C import CommError
from shardcomm.comm import introduction
from shardcomm.comm.c10d import C10dCommunicator
from shardcomm.comm.hosts import Place, place_of
from shardcomm.comm.receipt import Receipt
from shardcomm.comm.rendezvous import backend_of
from shardcomm.comm.transport_choice import choose_transport
from shardcomm.files.compiled import compiled
from shardcomm.files.installed import get_library_dir
from shardcomm.interop import c_library
from shardcomm.interop.c_library import SHM, CLibrary, loaded_everywhere
from shardcomm.meeting.comm_error import like
from shardcomm.meeting.connections import connect
from shardcomm.meeting.exchange import Exchange

NAME = "shardcomm"

_CPU = torch.device("cpu")


def receipts(group: dist.ProcessGroup | None = None) -> list[Receipt]:
    """The path that the latest collective of each kind took in a group of this backend, and why not a faster one.

    Args:
        group: A group that was made with "shardcomm". None: the default group.

    Raises:
        ValueError: The group is of another backend, or there is no default group.

    Example:
        ```py
        torch.distributed.init_process_group("shardcomm")
        torch.distributed.all_reduce(torch.ones(4))
        print(shardcomm.backend.receipts())
        ```
    """
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "receipts: there is no default group; call torch.distributed.init_process_group first"
            )
        group = dist.group.WORLD
    backend: Any = None
    if isinstance(group, dist.ProcessGroup):
        backend = backend_of(group, _CPU)
    if getattr(backend, "name", str)() != NAME:
        raise ValueError(
            f"receipts: the group's backend is {dist.get_backend(group)!r}; accepted: a group made with "
            f"'{NAME}'"
        )
    return [Receipt(*fields) for fields in backend.receipts()]


def make_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """The c10d::Backend of this rank; `init_process_group` and `new_group` call it. Collective.

    Raises:
        ValueError: `rank` is no rank of the group, or `timeout` is 0 or less.
        RuntimeError: On some rank the backend cannot be compiled or loaded; the error says on which, and why.
        CommError: A rank did not come.
    """
    if not 0 <= rank < size:
        raise ValueError(f"the backend {NAME!r}: rank is {rank}; it must be 0 to {size - 1}")
    if timeout <= timedelta(0):
        raise ValueError(f"the backend {NAME!r}: timeout is {timeout}; it must be more than 0")
    # A program may destroy its groups and make new ones over one store, in which the old groups' keys still are.
    store = PrefixStore(f"{NAME}/{store.add(f'made by {rank}', 1)}", store)
    carriers: tuple[ProcessGroupGloo, ...] = ()  # of all ranks, where `comm` is no faster one

    def gloo_for(use: str) -> ProcessGroupGloo:
        return ProcessGroupGloo(PrefixStore(f"gloo/{use}", store), rank, size, timeout)

    def through_gloo() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        nonlocal carriers
        carriers = (gloo_for("gathers"), gloo_for("reduces"))
        return cast("tuple[dist.ProcessGroup, dist.ProcessGroup]", carriers)

    deadline_s = timeout.total_seconds()
    exchange = Exchange(store, "connect", rank, size, deadline_s)
    with (
        exchange.telling(),
        choose_transport(exchange, "auto", _CPU, through_gloo) as comm,
    ):
        library, module = loaded_everywhere(
            comm, f"the backend {NAME!r} of torch.distributed", load
        )
        if isinstance(comm, C10dCommunicator):
            return module.Backend(rank, size, timeout, 0, carriers[0], comm.reason)
        if comm.transport != "hosts":
            handle = library.connect(comm, SHM, -1, deadline_s, range(size)).value
            return module.Backend(rank, size, timeout, handle, None, "")
        hosts = exchange(introduction.host_identity().encode())
        place = place_of(rank, hosts)
        assert isinstance(place, Place)  # as `comm` says
        gloo = exchange.wait_for(lambda: gloo_for("the rest"))
        sockets = connect(exchange, place.across)
        try:
            handle = library.connect(comm, SHM, -1, deadline_s, place.on_host).value
        except BaseException:
            for each in sockets:
                if each >= 0:
                    os.close(each)
            raise
        handle = module.join_hosts(handle, sockets, place.host)
        return module.Backend(rank, size, timeout, handle, gloo, "the ranks are on several hosts")


def error_of(*fields: Any) -> Exception:
    """What Python raises for an error of the C library, whose fields are those of `c_library.error_of`."""
    error = c_library.error_of(*fields)
    if isinstance(error, CommError) and error.kind == "late":
        return like(
            error,
            f"{error}; this is the timeout of the call or, if it has none, of init_process_group, new_group or "
            "set_timeout",
        )
    return error


def type_of_error(*fields: Any) -> type[Exception]:
    """A type that gives `error_of(*fields)` when it is called: torch calls the type of an error with its text.

    Nobody frees the type. So it holds the fields, and no error, whose traceback would hold the frames of a step.
    """

    # Python 3.11 may call the type again with the error that it has made.
    def made(_: type, said: object) -> Exception:
        return said if isinstance(said, Exception) else error_of(*fields)

    return type("Made", (type(error_of(*fields)),), {"__new__": made})


@cache
def load() -> tuple[CLibrary, Any]:
    """The C library, and the module with the backend; the first call of a machine compiles the module.

    Raises:
        RuntimeError: There is no C++ compiler, or it refuses; the error has its words.
    """
    library = CLibrary()  # in the process before the module, which needs it
    source = Path(get_library_dir()) / "torch" / "module.cpp"
    # As torch.utils.cpp_extension says, which loads setuptools, and so takes longer than all else that a group needs.
    of_torch = Path(torch.__file__).parent
    headers = of_torch / "include"
    folders = [headers, headers / "torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    options = [option for folder in folders for option in ("-isystem", str(folder))]
    name = f"torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}"
    libraries = [f"-L{of_torch / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    path = compiled(f"the backend {NAME!r}", name, source, ["-std=c++20", *options], libraries)
    loader = importlib.machinery.ExtensionFileLoader("shardcomm_torch", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return library, module


def leave_all() -> None:
    """Leaves all groups, when the process ends.

    A callback's thread that needs the interpreter after the interpreter's end would abort the process.
    """
    if load.cache_info().currsize:
        _, module = load()
        module.leave_all()


shardcomm_autoload.register()
