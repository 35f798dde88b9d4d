"""Write the table of theorems and verdicts into README.md, and the JSON schema of scenarios.

The table, and how many verdicts there are, come from the committed verdicts; the schema from the
records that scenarios are read into. With ``--check`` nothing is written, and the exit status is 1
where one of them is not current.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

from conformance import schema
from conformance.expectations import suite_of, where
from spec.theorems import OBLIGATIONS, THEOREMS

ROOT = Path(__file__).resolve().parent.parent
Verdicts = dict[str, dict[str, dict[str, str]]]
README = ROOT / "README.md"
VERDICTS = ROOT / "generated_tests" / "scenarios" / "verdicts.json"
SCENARIO_SCHEMA = ROOT / "docs" / "scenario.schema.json"
#: The last line that `make prove` prints.
TOTALS = re.compile(r"^\d+ obligations: .*$", re.MULTILINE)
BEGIN, END = "<!-- verdicts: written by scripts/docs.py -->", "<!-- end of verdicts -->"


def table(verdicts: Verdicts) -> str:
    """Return the table as Markdown: a row per theorem and manager, a column per target."""
    targets = list(verdicts)
    lines = [f"| theorem | claim | {' | '.join(targets)} |", "|---|---|" + "---|" * len(targets)]
    for slug, theorem in THEOREMS.items():
        for manager in theorem.managers:
            cells = [_cell(verdicts[target], manager, slug) for target in targets]
            is_first = manager == theorem.managers[0]
            claim = theorem.sentence if is_first else "the same of several groups"
            claim = f"{claim} (`{manager}`)" if manager != "mamba-align" else claim
            lines.append(f"| `{slug}` | {claim} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def totals(verdicts: Verdicts) -> str:
    """Return the line that says how many obligations there are, and how they end."""
    counts = Counter(
        verdict
        for by_kind in verdicts.values()
        for by_theorem in by_kind.values()
        for verdict in by_theorem.values()
    )
    return (
        f"{counts.total()} obligations: {counts['PROVED']} proved, {counts['REFUTED']} not, "
        f"{counts['NOT_APPLICABLE']} not applicable; 0 not as expected"
    )


def _cell(by_kind: dict[str, dict[str, str]], manager: str, slug: str) -> str:
    """How many kinds of step have which verdict; those that a theorem is not about do not count."""
    kinds = [where(suite_of(manager, family), tags) for family, tags in OBLIGATIONS]
    counts = Counter(by_kind[kind][slug] for kind in kinds)
    del counts["NOT_APPLICABLE"]
    if len(counts) == 1:
        return next(iter(counts))
    words = [f"{verdict} in {count}" for verdict, count in counts.most_common()]
    return ", ".join(word.replace("REFUTED", "**REFUTED**") for word in words)


def updated(text: str) -> str:
    """Return the README with the current verdicts."""
    verdicts = json.loads(VERDICTS.read_text(encoding="utf-8"))["verdicts"]
    before, rest = text.split(BEGIN)
    text = f"{before}{BEGIN}\n{table(verdicts)}\n{END}{rest.split(END)[1]}"
    return TOTALS.sub(totals(verdicts), text)


def main() -> int:
    current = {
        README: updated(README.read_text(encoding="utf-8")),
        SCENARIO_SCHEMA: schema.text(),
    }
    stale = [file for file, text in current.items() if _text(file) != text]
    only_checks = "--check" in sys.argv[1:]
    for file in stale:
        if only_checks:
            print(f"{file.relative_to(ROOT)}: not current; run scripts/docs.py")
        else:
            file.write_text(current[file], encoding="utf-8")
    return int(only_checks and bool(stale))


def _text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.exists() else None


if __name__ == "__main__":
    sys.exit(main())
