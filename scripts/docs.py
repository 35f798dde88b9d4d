"""Write the table of theorems and verdicts into README.md from the committed verdicts.

With ``--check`` nothing is written, and the exit status is 1 where the table is not current.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from conformance.expectations import suite_of, where
from spec.theorems import OBLIGATIONS, THEOREMS

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
VERDICTS = ROOT / "generated_tests" / "scenarios" / "verdicts.json"
BEGIN, END = "<!-- verdicts: written by scripts/docs.py -->", "<!-- end of verdicts -->"


def table() -> str:
    """Return the table as Markdown: a row per theorem and manager, a column per target."""
    verdicts = json.loads(VERDICTS.read_text(encoding="utf-8"))["verdicts"]
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
    """Return the README with the current table."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def main() -> int:
    text = README.read_text(encoding="utf-8")
    current = updated(text)
    if "--check" in sys.argv[1:]:
        if text != current:
            print("README.md: the table of verdicts is not current; run scripts/docs.py")
        return int(text != current)
    README.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
