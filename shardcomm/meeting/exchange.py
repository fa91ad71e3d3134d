"""How ranks show each other a few bytes at set-up, over a torch Store: a launcher's, a ProcessGroup's, or rank 0's.

No rank waits for one that is known to have died, or longer than the deadline, and Ctrl-C ends every wait. A rank that
gives up leaves word for the others. A seal tells the words of ranks from what somebody else wrote there::

    NAME/0/1       the word of rank 1 in the first round (its world size and its payload), behind a header and a seal
                   over key and word
    NAME/failed    the CommError of a rank that gave up, as a word in the same form
"""

from __future__ import annotations

import hmac
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from shardcomm._C import CommError, ProcessWatch
from shardcomm.meeting.background import Background
from shardcomm.meeting.comm_error import comm_error, from_bytes, to_bytes
from shardcomm.meeting.store import first_line, seal

T = TypeVar("T")

_HEADER = b"shardcomm 3\n"  # the version of this protocol
_SEAL_BYTES = len(seal(b""))

_NOTHING = "nothing"  # a store's answer where there is no such key

_LOOK_S = 0.05  # between looks at the ranks' processes
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.05  # between looks at the store
_LAST_WORD_S = 1.0  # how long a store or a group may take for a last answer when there is trouble


class _NotAllCameError(Exception):
    """Some ranks have not come, and no rank has said why."""


class Watched(NamedTuple):
    """The process of a rank on this host, and what watches it."""

    pid: int
    watch: ProcessWatch


class Exchange:
    """An all-gather of bytes at set-up: a call with bytes returns those of all ranks, in rank order; collective.

    All ranks share `store`, in which `name` keeps the keys apart from those of other exchanges.

    Raises:
        CommError: A rank did not come within `deadline_s` seconds, or died, or gave up.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, deadline_s: float) -> None:
        self.rank = rank
        self.size = size
        self.deadline_s = deadline_s
        self.processes: dict[int, Watched] = {}
        """The processes whose death ends a wait, by rank. `comm.introduction` fills it."""
        self.store = store  # `meeting.connections` asks where it is
        self._name = name
        self._rounds = itertools.count()
        self._gave_up: CommError | None = None  # the error of another rank, when it was heard
        self._failure_is_posted = False

    def __call__(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks, in rank order; collective."""
        over = threading.Event()
        turn = next(self._rounds)
        keys = [f"{self._name}/{turn}/{peer}" for peer in range(self.size)]
        with self.telling():
            return self._wait_for(lambda: self._round(keys, payload, over), over)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A context: an exception in it reaches the ranks that wait for this one in their set-up, as a CommError."""
        try:
            yield
        except BaseException as error:
            self._tell(gave_up(error, self.rank, self.size))
            raise

    def wait_for(self, fn: Callable[[], T]) -> T:
        """Calls fn(), which waits for other ranks otherwise than through this exchange."""
        ended = threading.Event()
        listening = Background(lambda: self._listen(ended))
        try:
            return self._wait_for(fn, ended)
        finally:
            # A thread that comes back from the store when the interpreter has ended would abort the process.
            listening.ended(_LAST_WORD_S)

    def _wait_for(self, fn: Callable[[], T], over: threading.Event) -> T:
        """Calls fn(). `over` is set when the wait ends: who reads the store then looks a last time."""
        begun = Background(fn)
        end = time.monotonic() + self.deadline_s
        trouble: CommError | None = None
        try:
            while trouble is None and not begun.ended(min(_LOOK_S, end - time.monotonic())):
                if time.monotonic() >= end:
                    break
                trouble = self.trouble()
        finally:
            over.set()
        # A last word that a rank left before it died still counts: it may have ended because all was done.
        if not begun.ended(_LAST_WORD_S):
            raise (
                self._gave_up
                or trouble
                or late("nobody answers", self.rank, self.size, self.deadline_s)
            )
        try:
            return begun.result()
        except _NotAllCameError as error:
            raise trouble or late(str(error), self.rank, self.size, self.deadline_s) from None
        except CommError:  # it names the cause; a process that is seen dead may have died of it
            raise
        except RuntimeError as error:  # torch's, of a connection that a rank's death may have cut
            said = f"rank {self.rank} of {self.size}: the rendezvous failed: {first_line(error)}"
            refused = comm_error("backend", said, reporter=self.rank)
            raise trouble or self.trouble(_LAST_WORD_S) or refused from error

    def trouble(self, within_s: float = 0.0) -> CommError | None:
        """The error of a rank that gave up, or of ranks that have died; None if neither is known within `within_s`."""
        end = time.monotonic() + within_s
        while True:
            if self._gave_up is not None:
                return self._gave_up
            dead = {
                rank: f"rank {rank} (pid {pid})"
                for rank, (pid, watch) in self.processes.items()
                if watch.ended
            }
            if dead:
                text = f"{' and '.join(dead.values())} died during set-up"
                return comm_error("died", text, rank=min(dead), reporter=self.rank)
            if time.monotonic() >= end or not self.processes:
                return None
            time.sleep(0.01)

    def _listen(self, over: threading.Event) -> None:
        """Until `over`, listens whether another rank gives up. It cannot do so over a store that cannot be cloned."""
        # On a connection of its own: while torch waits for a key, torch's connection answers nobody else.
        self.store = self.store.clone()  # type: ignore[attr-defined]
        while self._gave_up is None:
            last = over.is_set()
            if (word := self._read(f"{self._name}/failed")) is not None:
                self._gave_up = from_bytes(word)
            if last:
                return
            over.wait(_LONGEST_PAUSE_S)

    def _tell(self, error: CommError) -> None:
        if not self._failure_is_posted:
            self._failure_is_posted = True
            # On a thread, since a store that is stopped must not keep this rank.
            Background(lambda: self._post(f"{self._name}/failed", to_bytes(error))).ended(
                _LAST_WORD_S
            )

    def _round(self, keys: Sequence[str], payload: bytes, over: threading.Event) -> list[bytes]:
        own = b"%d\n" % self.size + payload
        if self._post(keys[self.rank], own) != own:
            raise comm_error(
                "mismatch",
                f"two processes came to the rendezvous as rank {self.rank} of {self.size}; "
                "each needs a RANK of its own",
                rank=self.rank,
                reporter=self.rank,
            )
        shown = {self.rank: payload}
        pause_s = _SHORTEST_PAUSE_S
        failed: bytes | None = None
        while True:
            last = over.is_set() or failed is not None
            for peer in range(self.size):
                if peer in shown:
                    continue
                if (there := self._read(keys[peer])) is not None:
                    shown[peer] = self._payload(peer, there)
                elif not last:
                    break  # one question a look is enough, until the wait is over
            if len(shown) == self.size:
                return [shown[peer] for peer in range(self.size)]
            if failed is not None:
                raise from_bytes(failed)
            # Who gives up over what this round has shown does so when all words are there: they are looked for again.
            failed = self._read(f"{self._name}/failed")
            if failed is not None:
                continue
            if last:
                missing = [str(peer) for peer in range(self.size) if peer not in shown]
                raise _NotAllCameError(
                    f"no word of rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
                )
            over.wait(pause_s)
            pause_s = min(1.1 * pause_s, _LONGEST_PAUSE_S)

    def _payload(self, peer: int, word: bytes) -> bytes:
        size, _, payload = word.partition(b"\n")
        if int(size) != self.size:
            sizes = sorted([(self.rank, self.size), (peer, int(size))])
            said = " and ".join(f"{of} on rank {rank}" for rank, of in sizes)
            raise comm_error(
                "mismatch",
                f"WORLD_SIZE is {said}; it must be the same on every rank",
                reporter=self.rank,
            )
        return payload

    def _post(self, key: str, word: bytes) -> bytes:
        """Writes `word`, unless a word is there already; returns the word that is there afterwards."""
        sealed = (_HEADER + self._seal(key, word) + word).hex()
        return self._opened(key, self.store.compare_set(key, "", sealed))

    def _read(self, key: str) -> bytes | None:
        """The word that is there, or None. It takes one question, where `check` and `get` would take three."""
        value = self.store.compare_set(key, _NOTHING, _NOTHING)
        # For a store an empty value is none: the rank's own word replaces it.
        return None if value in (b"", _NOTHING.encode()) else self._opened(key, value)

    def _opened(self, key: str, value: bytes) -> bytes:
        try:
            sealed = bytes.fromhex(value.decode())
        except ValueError:
            sealed = b""
        start = len(_HEADER) + _SEAL_BYTES
        word = sealed[start:]
        if not sealed.startswith(_HEADER) or not hmac.compare_digest(
            sealed[len(_HEADER) : start], self._seal(key, word)
        ):
            raise CommError(
                f"key {key!r} of the rendezvous store holds {len(value)} bytes that no rank of this run wrote: "
                "somebody else reaches the store, or a rank runs another version of shardcomm or has another secret"
            )
        return word

    @staticmethod
    def _seal(key: str, word: bytes) -> bytes:
        return seal(key.encode() + b"\0" + word)


class GroupExchange(Exchange):
    """An exchange between some ranks of a ProcessGroup, over its store; None: all its ranks.

    All ranks of the group make it, in a collective of the group's own: if one of them has died, Gloo says so at once.
    """

    def __init__(
        self, group: dist.ProcessGroup, deadline_s: float, members: Sequence[int] | None = None
    ) -> None:
        members = range(group.size()) if members is None else members
        rank, size = members.index(group.rank()), len(members)
        # Not group.get_group_store(), which a group of threads does not have.
        store = distributed_c10d._get_process_group_store(group)
        super().__init__(store, "", rank, size, deadline_s)
        self._is_of_threads = dist.get_backend(group) == "threaded"  # torch's own, for tests

        def name() -> str:  # which the store has never had, although names of groups come again
            everybody = [""] * group.size()
            dist.all_gather_object(everybody, secrets.token_hex(8), group=group)
            return f"shardcomm/{everybody[0]}/{members[0]}"

        # Nobody can leave word under a name that is not known yet.
        self._name = (
            name() if self._is_of_threads else self._wait_for(_here(name), threading.Event())
        )

    def wait_for(self, fn: Callable[[], T]) -> T:
        """See `Exchange`."""
        if self._is_of_threads:  # each of which has its own groups
            return fn()
        return super().wait_for(_here(fn))


def _here(fn: Callable[[], T]) -> Callable[[], T]:
    """fn, for another thread: the current GPU is each thread's own."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return fn
    device = torch.cuda.current_device()

    def on_device() -> T:
        with torch.cuda.device(device):
            return fn()

    return on_device


def gave_up(error: BaseException, rank: int, size: int) -> CommError:
    """What the other ranks raise when `error` ended the set-up of this one."""
    if isinstance(error, CommError):
        return error
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    text = f"rank {rank} of {size} gave up its set-up: {said}"
    return comm_error("aborted", text, rank=rank, reporter=rank)


def late(why: str, rank: int, size: int, deadline_s: float) -> CommError:
    """What this rank raises if others have not come in time."""
    text = f"rank {rank} of {size}: not all ranks came to the rendezvous within {deadline_s:g} s: {why}"
    return comm_error("late", text, reporter=rank)
