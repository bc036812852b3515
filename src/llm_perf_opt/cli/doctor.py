"""Check what this machine has."""

from llm_perf_opt.cli.shared import Debug, Json, note_debug, print_json


def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Show what is installed, what is missing, what you lose without it, and how to get it."""
    note_debug(debug)
    from dataclasses import asdict

    from llm_perf_opt.profiling.vendor.checks import check_machine

    checks = check_machine()
    if as_json:
        print_json([asdict(check) for check in checks])
        return
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.status:<8} {check.name:<{width}}  {check.found}")
        for line in (check.costs, check.remedy):
            if line:
                print(f"{'':<8} {'':<{width}}  → {line}")
