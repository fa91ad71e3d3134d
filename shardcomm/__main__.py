"""The command line: `shardcomm COMMAND`, or `python -m shardcomm COMMAND`."""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn


def main() -> int:
    """Runs the subcommand that the arguments name.

    Returns:
        The exit status: the subcommand's, 130 after Ctrl-C, 143 after SIGTERM, or 129 after SIGHUP.
    """
    # Each rank that a command starts loads this module again, and needs none of the other commands.
    from shardcomm.cli.parser import make_parser  # noqa: PLC0415

    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it ignored
        signal.signal(signal.SIGHUP, _terminate)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # What the terminal has no letters for, as of a model's sample, must not end a command that has done its work.
        sys.stdout.reconfigure(errors="backslashreplace")
    args = make_parser().parse_args()
    try:
        status: int = args.run(args)
        if sys.stdout is not None:  # as it is where the caller has closed it
            sys.stdout.flush()
    except _Terminated as end:
        with suppress(OSError):  # after SIGHUP the terminal may be closed
            print("\nshardcomm: terminated", file=sys.stderr)  # below the progress bar
        return 128 + end.number
    except KeyboardInterrupt:
        print("\nshardcomm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os._exit(128 + signal.SIGPIPE)  # the reader of the output has enough
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"shardcomm: {where}{error.strerror or error}", file=sys.stderr)
        os._exit(1)  # at once, without another try to write the output
    return status


class _Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP has come, which ends a command as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _terminate(number: int, frame: object) -> NoReturn:
    # Either may follow, or come twice. Not SIG_IGN, which programs that are started now would inherit.
    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, lambda *_: None)
    raise _Terminated(number)


if __name__ == "__main__":
    sys.exit(main())
