"""All commands in one group, and what becomes of their errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from conformance.commands.arguments import CannotRun
from conformance.commands.bisect import bisect
from conformance.commands.conform import conform
from conformance.commands.gen_tests import gen_tests
from conformance.commands.lists import explain, list_targets
from conformance.commands.lives import explore
from conformance.commands.output import drop_output, fail
from conformance.commands.prove import prove
from conformance.commands.replay import replay
from conformance.commands.report import report
from conformance.commands.workloads import workloads
from conformance.ending import AS_EXPECTED, stopped
from conformance.scenario import ScenarioError
from conformance.targets import TargetError
from conformance.workload import WorkloadError
from models.loader import CoreError


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="capproof", prog_name="capproof")
def cli() -> None:
    """Prove or refute claims about vLLM's KV-cache block estimate, on the source itself."""


for _command in (prove, gen_tests, conform, replay, workloads, explore, bisect):
    cli.add_command(_command)
for _command in (report, list_targets, explain):
    cli.add_command(_command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; every failure is one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # Not `cli.main`, which has its own way with Ctrl-C and closed pipes.
        with cli.make_context("capproof", given) as context:
            return int(cli.invoke(context) or 0)
    except click.exceptions.Exit as error:
        return error.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        return stopped()
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "capproof"
        return fail(f"{error.format_message()} See `{command} --help`.")
    except click.ClickException as error:
        return fail(error.format_message())
    except (CannotRun, TargetError, ScenarioError, WorkloadError, CoreError) as error:
        return fail(str(error))
    except BrokenPipeError:
        drop_output()
        return AS_EXPECTED
    except OSError as error:
        return fail(f"{error.filename or 'output'}: {error.strerror or error}")
