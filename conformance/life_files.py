"""Lives as files: JSON that `capproof replay` accepts, and what a life showed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from conformance.driver import (
    MAX_POOL_BLOCKS,
    BindingError,
    Driver,
    core_driver,
    vllm_driver,
)
from conformance.life import Life, Plan, Rule, Setting
from conformance.life_checks import CHECKS, Check, KnownFault, Violation, known_fault
from conformance.life_tables import RequestWatched, Watcher, watched_from_json
from conformance.lives import NotPossible, SharedPool
from conformance.reading import Field, Malformed, headed, read_bytes, record
from conformance.replay import ask_process, own_standard_output
from conformance.scenario import ScenarioError, parse_geometry

KIND = "life"
SCHEMA = 1
#: Releases whose calls differ from what `conformance.life_scheduler` describes.
NOT_LIVED = ("0.24.0", "0.25.0", "0.26.0", "0.27.0")
#: Tokens of a request, and of a step, in a life from a file; each prefix of a prompt is hashed.
MAX_TOKENS = 2**16
#: Option of the process in the vllm tier.
WITH_TABLES = "--with-tables"

_Record = TypeVar("_Record", Setting, Plan, Rule)


@dataclass(frozen=True)
class LifeSeen:
    """What a life showed on one target."""

    violations: tuple[Violation, ...]
    known: tuple[KnownFault | None, ...]
    """The known fault that each may be."""
    num_rules: int
    """Rules applied before the life, or the engine, ended."""
    requests: tuple[RequestWatched, ...] = ()
    """What each request's block tables held after each rule; empty where nobody asked."""

    @property
    def unknown(self) -> tuple[Violation, ...]:
        """Violations that no known fault of the target explains."""
        pairs = zip(self.violations, self.known, strict=True)
        return tuple(violation for violation, fault in pairs if fault is None)


def run_life(
    driver: Driver,
    life: Life,
    target: str,
    checks: tuple[Check, ...] = CHECKS,
    with_tables: bool = False,
) -> LifeSeen:
    """Apply a life's rules to a pool of the driver's tree; those that do not apply are passed over.

    Args:
        driver: Of the tree.
        life: What is applied.
        target: Whose known faults are named.
        checks: What is checked after every rule.
        with_tables: Whether to look at what block tables hold after every rule, which takes time.

    Raises:
        BindingError: The tree cannot be driven so.
    """
    pool = driver.shared_pool(life.setting, checks)
    watcher = Watcher(pool, target) if with_tables else None
    done = 0
    for number, rule in enumerate(life.rules, start=1):
        if pool.is_dead:
            break
        if watcher is not None:
            watcher.next_rule(number)
        try:
            pool.apply(rule)
        except NotPossible:
            continue
        done += 1
    seen = seen_of(pool, target, done)
    return seen if watcher is None else replace(seen, requests=watcher.requests)


@dataclass(frozen=True)
class LifeReplayed:
    """What a life showed, in lines."""

    num_rules: int
    lines: tuple[str, ...]
    """One per violation, with the known fault that it may be."""
    num_unknown: int
    requests: tuple[RequestWatched, ...] = ()
    """As in `LifeSeen`."""


def replay_lives(
    root: Path, tier: str, lives: Sequence[Life], target: str, with_tables: bool = False
) -> list[LifeReplayed]:
    """Live lives on a tree: here in the core tier, in a process of their own in the vllm tier.

    Args:
        root: Folder that holds `vllm/`.
        tier: `core` or `vllm`.
        lives: What is lived.
        target: Whose known faults are named.
        with_tables: Whether to look at what block tables hold after every rule.

    Raises:
        BindingError: They cannot be driven, or the process failed.
    """
    if tier == "core":
        driver = core_driver(root)
        return [_replayed(driver, life, target, with_tables) for life in lives]
    answers, reason = ask_process(
        ["conformance.life_files", str(root), target, *([WITH_TABLES] if with_tables else [])],
        root,
        (json.dumps(to_json(life)) for life in lives),
    )
    if len(answers) < len(lives):
        raise BindingError(reason)
    return [_from_json(answer) for answer in answers]


def _replayed(driver: Driver, life: Life, target: str, with_tables: bool) -> LifeReplayed:
    seen = run_life(driver, life, target, with_tables=with_tables)
    lines = tuple(
        f"{violation} [{'NOT KNOWN' if fault is None else 'known: ' + fault.name}]"
        for violation, fault in zip(seen.violations, seen.known, strict=True)
    )
    return LifeReplayed(seen.num_rules, lines, len(seen.unknown), seen.requests)


def _to_json(seen: LifeReplayed) -> dict[str, Any]:
    requests = [request.to_json() for request in seen.requests]
    return {**asdict(replace(seen, requests=())), "requests": requests}


def _from_json(content: dict[str, Any]) -> LifeReplayed:
    requests = watched_from_json(content["requests"])
    return LifeReplayed(**{**content, "lines": tuple(content["lines"]), "requests": requests})


def seen_of(pool: SharedPool, target: str, num_rules: int) -> LifeSeen:
    """Return what a pool has shown so far."""
    violations = tuple(pool.violations)
    known = tuple(known_fault(violation, target) for violation in violations)
    return LifeSeen(violations, known, num_rules)


def to_json(life: Life) -> dict[str, Any]:
    """Return the JSON object of a life; what a rule leaves at its default is left out."""
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "setting": asdict(life.setting),
        "rules": [_rule_to_json(rule) for rule in life.rules],
    }


def dumps(life: Life) -> str:
    """Return the text of a life's file."""
    return json.dumps(to_json(life), indent=2, sort_keys=True, allow_nan=False) + "\n"


def load(path: Path) -> Life:
    """Read a life's file.

    Raises:
        ScenarioError: It cannot be read, or is not one; one line with file and field.
    """
    try:
        return loads(read_bytes(path))
    except Malformed as error:
        raise ScenarioError(f"{path}: {error}") from None


def loads(data: bytes | str) -> Life:
    """Read the text of a life's file.

    Raises:
        Malformed: It is not one; one line with the field.
    """
    life = headed(data, KIND, SCHEMA).object(("setting", "rules"))
    given = life["setting"]
    setting = _bounded(Setting, given, geometry=parse_geometry, plans=_plans)
    if setting.num_steps_in_flight and setting.geometry.num_speculative_blocks:
        raise given.refuse("num_steps_in_flight: steps with drafts wait for each output")
    return Life(setting, tuple(_rule(rule, len(setting.plans)) for rule in life["rules"].items()))


def _plans(given: Field) -> tuple[Plan, ...]:
    return tuple(_bounded(Plan, plan) for plan in given.items())


def _rule(given: Field, num_requests: int) -> Rule:
    rule = _bounded(Rule, given)
    if rule.name not in RULES:
        raise given.refuse(f"no rule {rule.name!r}; there are {', '.join(RULES)}")
    if rule.request >= num_requests:
        raise given.refuse(f"request {rule.request} of {num_requests}")
    return rule


def _bounded(cls: type[_Record], given: Field, **read: Callable[[Field], Any]) -> _Record:
    """Read a record whose numbers are not too large to be lived."""
    found = record(cls, given, **read)
    for name, field in given.mapping().items():
        most = MAX_POOL_BLOCKS if name == "num_gpu_blocks" else MAX_TOKENS
        if isinstance(field.value, int) and field.value > most:
            raise field.refuse(f"{field.value:,}: lives are run up to {most:,}")
    return found


#: Names of the rules.
RULES = (
    "admit",
    "promote",
    "run",
    "step",
    "arrive",
    "preempt",
    "finish",
    "abort",
    "reset",
    "alone",
)


def _rule_to_json(rule: Rule) -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(Rule)}
    return {name: value for name, value in asdict(rule).items() if value != defaults[name]}


def _main(root: str, target: str, *options: str) -> int:
    """Live the lives on the standard input in the vllm tier, one a line.

    2 where the tree cannot be driven.
    """
    answers = own_standard_output()
    try:
        driver = vllm_driver(Path(root))
        for line in sys.stdin:
            seen = _replayed(driver, loads(line), target, WITH_TABLES in options)
            print(json.dumps(_to_json(seen)), file=answers, flush=True)
    except BindingError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
