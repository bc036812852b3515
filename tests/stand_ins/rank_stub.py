"""A rank that computes nothing: reports what the variable STUB says for it, a list of words per rank.

NAME        report this as its position
error:TEXT  report an error of its own and end with exit code 4
lost:N      report that rank N did not answer and end with exit code 4
print:TEXT  write a line to its log
words:TEXT  write text without a line break to its log
deaf        write no stack on request
hang, kill, stop, exit:CODE
"""

import argparse
import faulthandler
import json
import os
import signal
import sys
import time


def send(event: str, **fields: object) -> None:
    print("@llm-perf " + json.dumps({"event": event, **fields}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    rank = parser.parse_known_args()[0].rank
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    for word in json.loads(os.environ["STUB"])[rank]:
        act(*word.partition(":")[::2])


def act(what: str, rest: str) -> None:
    if what == "hang":
        time.sleep(3600)
    elif what == "deaf":
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "words":
        print(rest, end="", flush=True)
    elif what == "exit":
        sys.exit(int(rest))
    elif what == "print":
        print(rest, flush=True)
    elif what in ("error", "lost"):
        lost = [int(rest)] if what == "lost" else []
        fact = f"Rank {rest} did not answer." if lost else rest
        send("error", kind="CaptureError", fact=fact, remedy="", of_another=what == "lost", missing=lost)
        sys.exit(4)
    else:
        send("position", text=what)


if __name__ == "__main__":
    main()
