"""The program `llm-perf`; `python -m llm_perf_opt.cli` is the same."""

import signal


def main() -> None:
    """Run the command. While its modules are imported, Ctrl-C ends it as other signals do: at once, without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from llm_perf_opt.cli.app import main as command

    command()


if __name__ == "__main__":
    main()
