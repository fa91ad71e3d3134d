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

    _open_what_is_closed()
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it ignored
        signal.signal(signal.SIGHUP, _terminate)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # What the terminal has no letters for, as of a model's sample, must not end a command that has done its work.
        sys.stdout.reconfigure(errors="backslashreplace")
    args = make_parser().parse_args()
    try:
        status: int = args.run(args)
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


def _open_what_is_closed() -> None:
    """Makes /dev/null of those standard streams that the caller has closed, for the ranks that are started, too.

    Else their numbers would be those of files that are opened next, into which others would print.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


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
