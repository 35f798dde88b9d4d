"""Verdicts as Markdown for the page of a CI job: what to do, what is not as expected, counts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from conformance.obligations import NOT_APPLICABLE, Row, summary
from conformance.outcomes import (
    advice,
    needs_attention,
    obligations_of,
    printable,
    production_sizes,
    prove_command,
    said,
    surprises,
)
from spec.theorems import THEOREMS

#: Bytes of a page; GitHub shows no job summary above 1 MiB, all steps of a job together.
MAX_BYTES = 500_000
#: Verdicts that are shown in full.
_MOST_IN_FULL = 20


def markdown_summary(rows: Sequence[Row], *, max_bytes: int = MAX_BYTES) -> str:
    """Return a page that says first what a person can act on.

    Args:
        rows: Verdicts.
        max_bytes: What is not as expected is cut where the page would be longer, and the page says
            how much is left out; never the result, nor the counts.
    """
    head = [f"## capproof: {_result(rows)}", "", *_advice(rows)]
    counts = ["### Verdicts", "", *_table(rows), "", summary(rows), ""]
    left = max_bytes - len("\n".join([*head, *counts]).encode()) - 200
    return "\n".join([*head, *_surprises(surprises(rows), left), *counts])


def _result(rows: Sequence[Row]) -> str:
    number = sum(map(needs_attention, rows))
    if not number:
        return f"all {len(rows)} verdicts are as expected"
    return f"{number} of {len(rows)} verdicts {'is' if number == 1 else 'are'} not as expected"


def _advice(rows: Sequence[Row]) -> list[str]:
    line = advice(rows)
    if line is None:
        return []
    words = line.removeprefix("what to do: ").split("`")
    shown = [code(part) if number % 2 else _text(part) for number, part in enumerate(words)]
    return [f"**What to do:** {''.join(shown)}", ""]


def _surprises(groups: Sequence[Sequence[Row]], max_bytes: int) -> Iterator[str]:
    """Yield what is not as expected until the page is full."""
    if not groups:
        return
    yield from ("### Not as expected", "")
    for number, rows in enumerate(groups):
        lines = _in_full(rows) if number < _MOST_IN_FULL else _briefly(rows)
        max_bytes -= len("\n".join([*lines, ""]).encode())
        if max_bytes < 0:
            left_out = sum(map(len, groups[number:]))
            yield f"- and {left_out} more, which `capproof prove` prints"
            break
        yield from lines
    yield ""


def _briefly(rows: Sequence[Row]) -> list[str]:
    return [f"- {code(obligations_of(rows))}: {_text(said(rows[0]))}"]


def _in_full(rows: Sequence[Row]) -> list[str]:
    row = rows[0]
    at_scale = production_sizes(row)
    lines = [
        *_briefly(rows),
        f"  - claim: {_text(THEOREMS[row['theorem']].sentence)}",
        *([] if at_scale is None else [f"  - at production sizes: {_text(at_scale)}"]),
        f"  - again: {code(prove_command(row))}",
    ]
    if row["scenario"] is None:
        return lines
    scenario = json.dumps(row["scenario"])
    replay = f"capproof replay scenario.json --target {row['target']} --draw"
    return [
        *lines,
        f"  - see it: save this line as `scenario.json`, then {code(replay)}",
        "",
        f"    {_fence(scenario)}json",
        f"    {scenario}",
        f"    {_fence(scenario)}",
    ]


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how many kinds of step have which verdict, by theorem and target."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    # In code, since GitHub makes links of words that look like addresses.
    heads = [code(target).replace("|", r"\|") for target in targets]
    yield "| theorem | " + " | ".join(heads) + " |"
    yield "|---|" + "---|" * len(targets)
    for theorem in dict.fromkeys(row["theorem"] for row in rows):
        cells = [
            _cell([row for row in rows if (row["theorem"], row["target"]) == (theorem, target)])
            for target in targets
        ]
        yield f"| `{theorem}` | " + " | ".join(cells) + " |"


def _cell(rows: Sequence[Row]) -> str:
    counts = Counter(row["verdict"] for row in rows if row["verdict"] != NOT_APPLICABLE)
    words = [f"{count} {verdict}" for verdict, count in counts.most_common()]
    surprises = sum(needs_attention(row) for row in rows)
    words += [f"**{surprises} not as expected**"] if surprises else []
    return ", ".join(words) or "not about any of these steps"


def code(text: str) -> str:
    """Return text as a code span that nothing inside it can end."""
    text = printable(text, kept="")
    runs = [len(run) for run in re.findall("`+", text)]
    fence = "`" * (max(runs, default=0) + 1)
    pad = " " if runs else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _fence(text: str) -> str:
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))


def _text(text: str) -> str:
    """Return text as plain words: no markup, no link, no mention of anybody."""
    return re.sub(r"([\\`*_\[\]<>|~#@&])", _escaped, printable(text, kept=""))


def _escaped(match: re.Match[str]) -> str:
    """An entity, which Markdown shows as the character and reads as nothing else."""
    return f"&#{ord(match[1])};"
