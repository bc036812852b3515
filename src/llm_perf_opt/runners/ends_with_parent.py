"""Replace this process by a program that is interrupted when its parent dies, even by `kill -9`.

    python ends_with_parent.py LOG PROGRAM ARGUMENT …

The program writes to LOG itself: a message into the pipe of a dead parent would end it in the middle of its shutdown. The pipe
stays open until it ends. Run as a file: it needs nothing but the standard library. Without prctl (macOS) nothing tells the
program that its parent has died.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""include/uapi/linux/prctl.h"""
_PIPE = 9
"""A descriptor that nothing else uses."""


def main() -> None:
    """Ask the kernel for SIGINT at the parent's death, which survives exec, and run the program."""
    parent = os.environ.get("LLM_PERF_PARENT_PID", "")
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0)
    if parent.isdigit() and os.getppid() != int(parent):
        sys.exit(1)  # it died before the kernel was asked
    os.dup2(sys.stdout.fileno(), _PIPE)
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - an argv list, never a shell


if __name__ == "__main__":
    main()
