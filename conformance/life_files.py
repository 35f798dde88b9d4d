"""Lives as files: JSON that `capproof replay` accepts, and what a life showed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from conformance.driver import (
    MAX_POOL_BLOCKS,
    BindingError,
    Driver,
    core_driver,
    vllm_driver,
)
from conformance.life_checks import CHECKS, Check, KnownFault, Violation, known_fault
from conformance.lives import Life, NotPossible, Plan, Rule, Setting, SharedPool
from conformance.reading import Field, Malformed, parse_json, read_bytes
from conformance.replay import PROCESS_TIMEOUT_S, tier_environment
from conformance.scenario import ScenarioError, parse_geometry

KIND = "life"
SCHEMA = 1
#: Tokens of a request, and of a step, in a life from a file; each prefix of a prompt is hashed.
MAX_TOKENS = 2**16

_Record = TypeVar("_Record", Plan, Rule)


@dataclass(frozen=True)
class LifeSeen:
    """What a life showed on one target."""

    violations: tuple[Violation, ...]
    known: tuple[KnownFault | None, ...]
    """The known fault that each may be."""
    num_rules: int
    """Rules applied before the life, or the engine, ended."""

    @property
    def unknown(self) -> tuple[Violation, ...]:
        """Violations that no known fault of the target explains."""
        pairs = zip(self.violations, self.known, strict=True)
        return tuple(violation for violation, fault in pairs if fault is None)


def run_life(
    driver: Driver, life: Life, target: str, checks: tuple[Check, ...] = CHECKS
) -> LifeSeen:
    """Apply a life's rules to a pool of the driver's tree; those that do not apply are passed over.

    Raises:
        BindingError: The tree cannot be driven so.
    """
    pool = driver.shared_pool(life.setting, checks)
    done = 0
    for rule in life.rules:
        if pool.is_dead:
            break
        try:
            pool.apply(rule)
        except NotPossible:
            continue
        done += 1
    return seen_of(pool, target, done)


@dataclass(frozen=True)
class LifeReplayed:
    """What a life showed, in lines."""

    num_rules: int
    lines: tuple[str, ...]
    """One per violation, with the known fault that it may be."""
    num_unknown: int


def replay_life(root: Path, tier: str, life: Life, target: str) -> LifeReplayed:
    """Live a life on a tree: here in the core tier, in a process of its own in the vllm tier.

    Raises:
        BindingError: It cannot be driven, or the process failed.
    """
    if tier == "core":
        return _replayed(core_driver(root), life, target)
    command = [sys.executable, "-m", "conformance.life_files", str(root), target]
    done = subprocess.run(
        command,
        input=dumps(life),
        capture_output=True,
        text=True,
        env=tier_environment(root),
        timeout=PROCESS_TIMEOUT_S,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no error shown"])[-1]
        raise BindingError(f"vllm tier: {last}")
    values = json.loads(done.stdout.splitlines()[-1])
    return LifeReplayed(values["num_rules"], tuple(values["lines"]), values["num_unknown"])


def _replayed(driver: Driver, life: Life, target: str) -> LifeReplayed:
    seen = run_life(driver, life, target)
    lines = tuple(
        f"{violation} [{'NOT KNOWN' if fault is None else 'known: ' + fault.name}]"
        for violation, fault in zip(seen.violations, seen.known, strict=True)
    )
    return LifeReplayed(seen.num_rules, lines, len(seen.unknown))


def seen_of(pool: SharedPool, target: str, num_rules: int) -> LifeSeen:
    """Return what a pool has shown so far."""
    violations = tuple(pool.violations)
    known = tuple(known_fault(violation, target) for violation in violations)
    return LifeSeen(violations, known, num_rules)


def dumps(life: Life) -> str:
    """Return the text of a life's file; fields that a rule leaves at their default are left out."""
    setting = asdict(life.setting)
    content = {
        "schema": SCHEMA,
        "kind": KIND,
        "setting": setting,
        "rules": [_rule_to_json(rule) for rule in life.rules],
    }
    return json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"


def is_life(path: Path) -> bool:
    """Return whether a file says that it holds a life."""
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("kind") == KIND


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
    life = parse_json(data).object(("kind", "schema", "setting", "rules"))
    if life["kind"].text() != KIND:
        raise life["kind"].refuse(f"expected {KIND!r}")
    if life["schema"].integer() != SCHEMA:
        raise life["schema"].refuse(f"expected {SCHEMA}")
    given = life["setting"].object([field.name for field in fields(Setting)], _OPTIONAL[Setting])
    geometry = parse_geometry(given.pop("geometry"))
    plans = tuple(_record(Plan, plan) for plan in given.pop("plans").items())
    setting = Setting(geometry=geometry, plans=plans, **_numbers(given))
    return Life(setting, tuple(_rule(rule, len(plans)) for rule in life["rules"].items()))


def _rule(given: Field, num_requests: int) -> Rule:
    rule: Rule = _record(Rule, given)
    if rule.name not in RULES:
        raise given.refuse(f"no rule {rule.name!r}; there are {', '.join(RULES)}")
    if rule.request >= num_requests:
        raise given.refuse(f"request {rule.request} of {num_requests}")
    return rule


def _record(record: type[_Record], given: Field) -> _Record:
    names = [field.name for field in fields(record)]
    return record(**_numbers(given.object(names, _OPTIONAL[record])))


def _numbers(given: Mapping[str, Field]) -> dict[str, Any]:
    return {name: _value(name, field) for name, field in given.items()}


def _value(name: str, field: Field) -> Any:
    if name == "name":
        return field.text()
    if name in ("loads_asynchronously", "full_sequence_must_fit"):
        return field.boolean()
    number, most = field.integer(), MAX_POOL_BLOCKS if name == "num_gpu_blocks" else MAX_TOKENS
    if number > most:
        raise field.refuse(f"{number:,}: lives are run up to {most:,}")
    return number


#: Fields of each record that a file may leave out.
_OPTIONAL = {
    record: [field.name for field in fields(record) if field.default is not MISSING]
    for record in (Setting, Plan, Rule)
}


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


def _main(root: str, target: str) -> None:
    """Live the life on the standard input in the vllm tier."""
    seen = _replayed(vllm_driver(Path(root)), loads(sys.stdin.read()), target)
    print(json.dumps(asdict(seen)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
