"""The command line: `capproof prove`, `gen-tests`, `conform`, `replay`, `bisect` and two lists.

Exit status: 0 as expected; 1 a verdict or a replay is not as expected, or a bisection names no
commit; 2 the command could not run, with one line saying what and what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from conformance.ending import ctrl_c_ends_imports, stopped


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    try:
        with ctrl_c_ends_imports():
            import conformance.commands.root  # noqa: F401
        status = run(arguments)
    except KeyboardInterrupt:
        status = stopped()
    sys.exit(status)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; every failure is one line on stderr."""
    from conformance.commands.root import run as run_command

    return run_command(arguments)


if __name__ == "__main__":
    main()
