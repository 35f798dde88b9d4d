"""What commands that draw share: their options, and refusing what cannot be drawn."""

from __future__ import annotations

from pathlib import Path

import click

from conformance.commands.arguments import CannotRun, check_writable

draw_option = click.option(
    "--draw", is_flag=True, help="Print block tables and free blocks, step by step, as a picture."
)
draw_svg_option = click.option(
    "--draw-svg",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the picture of the first target as SVG.",
)


def check_one(given: str, count: int, what: str) -> None:
    """Refuse a picture of several scenarios or workloads."""
    if count > 1:
        raise CannotRun(f"{given}: {count} {what}, and --draw-svg draws one; name one")


def check_svg(file: Path) -> None:
    """Refuse a picture that would replace what is no picture."""
    from conformance.svg import MARKER

    check_writable("--draw-svg", file)
    if file.is_file() and not file.read_bytes().startswith(MARKER.encode()):
        raise CannotRun(f"--draw-svg {file}: is no picture of capproof's; name another file")
