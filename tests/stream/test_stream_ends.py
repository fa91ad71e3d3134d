"""However a process or a stream ends while something is queued: it runs, or a sentence says why not, and no crash."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from support.interpreters import run

PREAMBLE = """
import os, sys, threading
from shardcomm import Communicator, Stream
stream = Stream()
hold = threading.Event()
"""

# What a script does, and what it prints.
ENDS = {
    "while a callable runs and another is queued": (
        """
stream.enqueue(lambda: hold.wait(0.3))
stream.enqueue(lambda: print("ran", flush=True))
""",
        "ran",
    ),
    "while a callable queues another": (
        """
stream.enqueue(lambda: hold.wait(0.3))
stream.enqueue(lambda: stream.enqueue(lambda: print("ran", flush=True)))
""",
        "ran",
    ),
    "with a stream in a cycle": (
        """
kept = [stream]
kept.append(kept)
stream.enqueue(lambda: hold.wait(0.3))
del stream, kept
""",
        "",
    ),
    "with a stream that has failed": (
        """
stream.enqueue(lambda: 1 / 0)
event = stream.record()
while not event.query():
    pass
del event
""",
        "",
    ),
    "while a daemon thread waits for an event": (
        """
stream.enqueue(lambda: hold.wait(0.5))
event = stream.record()
threading.Thread(target=event.wait, daemon=True).start()
hold.wait(0.2)
""",
        "",
    ),
    "while a daemon thread waits for other ranks": (
        """
ranks = Communicator.local_group(2, deadline_s=60)
threading.Thread(target=ranks[0].barrier, daemon=True).start()
hold.wait(0.2)
""",
        "",
    ),
    "while a daemon thread goes on queueing": (
        """
def queue():
    try:
        while True:
            stream.enqueue(lambda: None)
            hold.wait(0.001)
    except RuntimeError as error:
        print(error, flush=True)

threading.Thread(target=queue, daemon=True).start()
stream.enqueue(lambda: hold.wait(0.3))
""",
        "enqueue: the interpreter is ending, and streams take no more Python callables",
    ),
    "in a child, which has queued something, too": (
        """
stream.enqueue(hold.wait)
child = os.fork()
if child == 0:
    own = Stream()
    own.enqueue(lambda: print("ran", flush=True))
    sys.exit(7)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
hold.set()
sys.exit(status != 7)
""",
        "ran",
    ),
    "after a callable has forked, and goes on in the child": (
        """
children = []

def fork():
    child = os.fork()
    if child != 0:
        children.append(child)

stream.enqueue(fork)
stream.synchronize()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
""",
        "",
    ),
    "after its own callable has let go of a stream": (
        """
streams = [stream]
del stream
ready = threading.Event()

def let_go():
    ready.wait()
    streams.clear()

streams[0].enqueue(let_go)
streams[0].enqueue(lambda: (print("ran", flush=True), hold.set()))
ready.set()
assert hold.wait(20)
""",
        "ran",
    ),
}


@pytest.mark.parametrize(("script", "printed"), ENDS.values(), ids=ENDS)
def test_a_process_ends_well(script: str, printed: str) -> None:
    ended = run(PREAMBLE + script)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == printed


def test_an_exit_that_waits_says_so_and_is_interrupted() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + "stream.enqueue(hold.wait)"],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = threading.Timer(60, process.kill)
    deadline.start()
    try:
        assert process.stderr is not None
        waits = process.stderr.readline()
        assert "its streams have run what they were given" in waits
        assert "Python callables left: 1" in waits
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[1]
    finally:
        deadline.cancel()
        process.kill()
        process.wait()
    assert rest == "shardcomm: Python callables of streams that are dropped: 1\n"
    assert process.returncode == 0


ENDLESS = {
    "a stream for itself": "stream.enqueue(stream.synchronize)",
    "two streams for each other": """
both = threading.Barrier(2)
other = Stream()

def wait_for(one):
    both.wait()
    one.synchronize()

stream.enqueue(lambda: wait_for(other))
other.enqueue(lambda: wait_for(stream))
""",
    "a stream for one that waits for its event": """
other = Stream()
events = []
begin = threading.Event()

def wait():
    begin.wait()
    other.synchronize()

stream.enqueue(wait)
other.wait(stream.record())
begin.set()
""",
}


@pytest.mark.parametrize("script", ENDLESS.values(), ids=ENDLESS)
def test_a_wait_that_would_never_end_is_refused(script: str) -> None:
    end = """
try:
    stream.synchronize()
except RuntimeError as error:
    print(error)
"""
    ended = run(PREAMBLE + script + end)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("this wait would never end: "), ended.stdout


def test_an_operation_may_wait_for_what_its_stream_did_before() -> None:
    script = """
before = stream.record()
seen = []
stream.enqueue(lambda: (before.wait(), seen.append(1)))
stream.synchronize()
assert seen == [1]
"""
    ended = run(PREAMBLE + script)
    assert ended.returncode == 0, ended.stderr
