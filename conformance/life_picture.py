"""Pictures of a life: one for each request, with a row for each rule that touched it."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.life_tables import RequestWatched, RuleSeen
from conformance.picture import Picture, Row, Segment, lines_of, segments_of, tokens_in_words


def life_pictures(watched: Sequence[RequestWatched]) -> list[Picture]:
    """Return what is drawn of the requests that a rule touched."""
    return [_picture(request) for request in watched if request.rules]


def _picture(request: RequestWatched) -> Picture:
    segments = segments_of(table for seen in request.rules for table in seen.tables)
    rows = tuple(_row(seen, segments) for seen in request.rules)
    title = f"request {request.request}: {request.words}"
    return Picture(title, tuple(segments), rows, request.num_left_out, "rules")


def _row(seen: RuleSeen, segments: Sequence[Segment]) -> Row:
    name = f"rule {seen.number}"
    return Row(
        name=name,
        head=f"{name}: {seen.words}; {_tokens(seen)}, {seen.stage}",
        lines=lines_of([table for table in seen.tables if _has_blocks(seen)], segments),
        free=seen.free,
        estimate=seen.estimate,
        drawn=seen.drawn,
        mark=f"breaks {', '.join(seen.broken)}" if seen.broken else "",
        asks_for_blocks=seen.asked,
    )


def _has_blocks(seen: RuleSeen) -> bool:
    return any(table.length for table in seen.tables)


def _tokens(seen: RuleSeen) -> str:
    if seen.start == seen.end:
        return tokens_in_words(seen.end)
    return f"{seen.start:,} to {tokens_in_words(seen.end)}"
