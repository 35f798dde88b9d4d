"""Every life up to a size, on the real code: depth first, each state once.

A life is replayed rule by rule; where it comes to a state that was met before with as many rules
left, or more, it is not followed further. Two states are the same if they differ only in the
numbers of blocks, and in which of several like requests is which.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

from conformance.bindings import one_line
from conformance.driver import Driver, DriverError, core_driver
from conformance.life import Life, Plan, Rule, Setting, Stage
from conformance.life_checks import known_fault
from conformance.lives import NotPossible, SharedPool
from spec.vocabulary import Geometry

#: Tokens that a prefill or a decode step has left for a request, besides all of them: a grid.
ALL_TOKENS = 64


@dataclass(frozen=True)
class Bounds:
    """How far lives are explored."""

    num_rules: int
    token_grid: tuple[int, ...] = (2, ALL_TOKENS)
    external_grid: tuple[int, ...] = (0, 2)


@dataclass
class Explored:
    """What an exploration met."""

    num_states: int = 0
    num_lives: int = 0
    """Rules applied to a state, each the end of one life."""
    num_known: int = 0
    """Lives that end in a known fault of the target."""
    violations: tuple[tuple[str, Life], ...] = ()
    """Those that are not known, each with the life that shows it."""

    def add(self, other: Explored) -> None:
        """Add what another part met; states of both are counted twice."""
        self.num_states += other.num_states
        self.num_lives += other.num_lives
        self.num_known += other.num_known
        self.violations += other.violations


def small_setting(
    num_gpu_blocks: int,
    num_requests: int,
    release_has_checkpoints: bool,
    num_steps_in_flight: int = 0,
) -> Setting:
    """Like requests of two and a half blocks of 2 tokens, which share what they begin with.

    With steps in flight there are no drafts, and two blocks more for each.
    """
    num_drafts = 0 if num_steps_in_flight else 1
    geometry = Geometry(2, 1, num_drafts, int(release_has_checkpoints), 1, False)
    plans = tuple(Plan(5 + 4 * num_steps_in_flight, 2, 99) for _ in range(num_requests))
    return Setting(geometry, num_gpu_blocks, plans, num_steps_in_flight=num_steps_in_flight)


def choices(pool: SharedPool, bounds: Bounds) -> Iterator[Rule]:
    """The rules that may apply in a state; of like waiting requests the first alone."""
    seen_waiting: set[Plan] = set()
    for request in pool.requests:
        i, stage = request.number, request.stage
        if stage in (Stage.WAITING, Stage.PREEMPTED):
            if stage is Stage.WAITING and request.plan in seen_waiting:
                continue
            seen_waiting |= {request.plan} if stage is Stage.WAITING else set()
            for tokens in bounds.token_grid:
                yield Rule("admit", i, tokens)
            for external in filter(None, bounds.external_grid):
                yield Rule("admit", i, ALL_TOKENS, external)
                yield Rule("admit", i, ALL_TOKENS, external, True)
        elif stage is Stage.RUNNING:
            for tokens in bounds.token_grid:
                for accepted in range(min(request.num_drafts, 1) + 1):
                    yield Rule("run", i, tokens, num_accepted=accepted)
            yield Rule("preempt", i)
        elif stage is Stage.ARRIVED:
            yield from (Rule("promote", i, tokens) for tokens in bounds.token_grid)
        elif stage in (Stage.LOADING, Stage.LEAVING):
            yield Rule("arrive", i)
        if not pool.is_open and stage not in (Stage.ENDED, Stage.LEAVING, Stage.WAITING):
            yield Rule("abort", i)
        if not pool.is_open and stage not in (Stage.ENDED, Stage.LEAVING):
            yield Rule("alone", i)
    if pool.is_open or pool.in_flight:
        yield Rule("step")
    if not pool.is_open:
        yield Rule("reset")


def state_key(pool: SharedPool) -> int:
    """A number that states share if they differ only in block ids and in like requests' order."""
    plans = pool.setting.plans
    if len(set(plans)) == 1 and plans[0].num_shared_tokens >= plans[0].num_prompt_tokens + 9:
        orders: Iterator[tuple[int, ...]] = permutations(range(len(plans)))
    else:
        orders = iter([tuple(range(len(plans)))])
    return min(hash(_described(pool, order)) for order in orders)


def _described(pool: SharedPool, order: Sequence[int]) -> tuple[Any, ...]:
    """All that later rules depend on, blocks numbered as they are met."""
    numbers: dict[int, int] = {0: 0}
    name_of = {pool.requests[i].request_id: place for place, i in enumerate(order)}

    def numbered(value: Any) -> Any:
        if hasattr(value, "block_id"):
            return numbers.setdefault(value.block_id, len(numbers))
        if isinstance(value, str):
            return name_of.get(value, value)
        if isinstance(value, dict):
            items = [(name_of.get(k, k), v) for k, v in value.items()]
            return tuple((k, numbered(v)) for k, v in sorted(items, key=lambda item: repr(item[0])))
        if isinstance(value, list | tuple):
            return tuple(map(numbered, value))
        if isinstance(value, set | frozenset):
            return tuple(sorted(map(numbered, value), key=repr))
        return value

    requests = [pool.requests[i] for i in order]
    described: list[Any] = []
    for request in requests:
        row = request.row
        described.append(
            (
                request.stage.value,
                request.num_computed_tokens,
                request.num_output_tokens,
                request.num_drafts,
                request.num_preemptions > 0,
                request.num_in_flight_tokens,
                request.num_stale_output_tokens,
                request.num_output_placeholders,
                request.shared_prefix_boundary,
                request in pool.inflight_prefills,
                _entry(pool.scheduled.get(request.number)),
                [[_entry(e) for e in step if e.request is request] for step in pool.in_flight],
                row and (row.state_column, row.num_accepted),
            )
        )
    for manager in pool.managers:
        state = vars(manager)
        for name in sorted(state):
            value = state[name]
            if name == "req_to_blocks":
                value = {request: table for request, table in value.items() if table}
            if isinstance(value, dict | set | list) and name != "new_block_ids":
                described.append((name, numbered(value)))
    for request in requests:
        tables = request.row.tables if request.row else ()
        described.append([[numbers.setdefault(i, len(numbers)) for i in t] for t in tables])
    free = pool.pool.free_block_queue.get_all_free_blocks()
    described.append([(numbered(block), block.ref_cnt) for block in free])
    for block in pool.pool.blocks:
        if block.ref_cnt or block.block_hash is not None:
            hashed = block.block_hash and pool.hasher.tokens(block.block_hash[:-4])
            content = pool.shadow.contents.get(block.block_id)
            described.append((numbered(block), hashed, content))
    described.append((pool.is_open, pool.admits_no_more, pool.has_admitted, pool.is_dead))
    return _frozen(described)


def _entry(entry: Any) -> Any:
    if entry is None:
        return None
    return (entry.start, entry.num_new, entry.num_drafts, entry.num_accepted, entry.checkpoint)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def explore(
    driver: Driver, setting: Setting, bounds: Bounds, target: str, prefix: tuple[Rule, ...] = ()
) -> Explored:
    """Live every life that begins so.

    Raises:
        BindingError: The tree cannot be driven.
    """
    found, met = Explored(), dict[int, int]()

    def follow(rules: tuple[Rule, ...], pool: SharedPool) -> None:
        left = bounds.num_rules - len(rules)
        for violation in pool.violations:
            if known_fault(violation, target) is None:
                found.violations += ((str(violation), Life(setting, rules)),)
                return
        if pool.violations:
            found.num_known += 1
        key = state_key(pool)
        if key not in met:
            found.num_states += 1
        if pool.is_dead or met.get(key, -1) >= left:
            return
        met[key] = left
        if left == 0:
            return
        for rule in list(choices(pool, bounds)):
            longer = (*rules, rule)
            try:
                after = _after(driver, setting, longer)
            except NotPossible:
                continue
            found.num_lives += 1
            follow(longer, after)

    follow(prefix, _after(driver, setting, prefix))
    return found


def _after(driver: Driver, setting: Setting, rules: tuple[Rule, ...]) -> SharedPool:
    pool = driver.shared_pool(setting)
    for rule in rules:
        pool.apply(rule)
    return pool


def random_life(driver: Driver, setting: Setting, bounds: Bounds, chance: Random) -> Life:
    """Live one life, each rule one of those that may apply then; it may end before its bound.

    Raises:
        BindingError: The tree cannot be driven.
    """
    return Life(setting, tuple(live_at_random(driver.shared_pool(setting), bounds, chance)))


def live_at_random(
    pool: SharedPool, bounds: Bounds, chance: Random, weights: Mapping[str, int] | None = None
) -> Iterator[Rule]:
    """Apply rules to a pool, each one of those that may apply then, and yield them.

    Args:
        pool: It lives until its engine is dead, or for `bounds.num_rules` rules.
        bounds: What may apply.
        chance: Chooses.
        weights: How often a rule is chosen, by name, beside others that are chosen once; None
            chooses all alike.
    """
    num_rules, names = 0, weights or {}
    while num_rules < bounds.num_rules and not pool.is_dead:
        rules = list(choices(pool, bounds))
        if names:
            (rule,) = chance.choices(rules, [names.get(rule.name, 1) for rule in rules])
        else:
            rule = chance.choice(rules)
        with suppress(NotPossible):
            pool.apply(rule)
            num_rules += 1
            yield rule


def first_rules(driver: Driver, setting: Setting, bounds: Bounds) -> list[tuple[Rule, ...]]:
    """The lives of two rules: what is spread over processes, and noted when it is done."""
    found: list[tuple[Rule, ...]] = []
    for first in choices(_after(driver, setting, ()), bounds):
        try:
            pool = _after(driver, setting, (first,))
        except NotPossible:
            continue
        if bounds.num_rules < 2 or pool.is_dead or pool.violations:
            found.append((first,))
            continue
        for second in choices(pool, bounds):
            try:
                _after(driver, setting, (first, second))
            except NotPossible:
                continue
            found.append((first, second))
    return found


def _part(
    root: str, setting: Setting, bounds: Bounds, target: str, prefix: tuple[Rule, ...]
) -> Explored:
    return explore(driver_of(root), setting, bounds, target, prefix)


@lru_cache(maxsize=4)
def driver_of(root: str) -> Driver:
    """Return a driver for a tree; a process loads it once."""
    return core_driver(Path(root))


def explore_in_parallel(
    root: Path,
    setting: Setting,
    bounds: Bounds,
    target: str,
    *,
    jobs: int,
    journal: Path | None = None,
    backend: str | None = None,
) -> Explored:
    """Live every life, its first two rules spread over processes.

    Args:
        root: The tree.
        setting: What is fixed.
        bounds: How far.
        target: Whose known faults are passed over.
        jobs: Processes.
        journal: JSON lines of the prefixes that are done, read first and added to.
        backend: Name of a joblib backend; None is joblib's own.

    Raises:
        DriverError: The journal is some other file, or joblib has no such backend.
    """
    driver, found = driver_of(str(root)), Explored()
    heading = repr((setting, bounds, target))
    done = _journal(journal, heading)
    works = [p for p in first_rules(driver, setting, bounds) if repr(p) not in done]
    for values in done.values():
        found.add(Explored(values[0], values[1], values[2]))
    parts = _spread(
        [(str(root), setting, bounds, target, prefix) for prefix in works], jobs, backend
    )
    for prefix, part in zip(works, parts, strict=True):
        found.add(part)
        # A part with violations is lived again, so that they are shown again.
        if journal is not None and not part.violations:
            with journal.open("a") as lines:
                numbers = [part.num_states, part.num_lives, part.num_known]
                lines.write(json.dumps([heading, repr(prefix), numbers]) + "\n")
    return found


def _spread(works: Sequence[tuple[Any, ...]], jobs: int, backend: str | None) -> Iterator[Explored]:
    """Do the parts here, or with joblib; results in the order of the parts."""
    if jobs == 1 and backend is None:
        yield from (_part(*work) for work in works)
        return
    from joblib import Parallel, delayed, parallel_config
    from joblib.parallel import get_active_backend

    with ExitStack() as stack:
        try:
            stack.enter_context(_cluster(backend, jobs))
            stack.enter_context(parallel_config(backend=backend or "loky", n_jobs=jobs))
        except (ValueError, ImportError, OSError) as error:
            raise DriverError(f"--backend {backend}: {one_line(error)}") from None
        # Ray's backend hands the results over all at once.
        one_by_one = get_active_backend()[0].supports_return_generator
        parallel = Parallel(return_as="generator" if one_by_one else "list")
        yield from parallel(delayed(_part)(*work) for work in works)


@contextmanager
def _cluster(backend: str | None, jobs: int) -> Iterator[None]:
    """Connect to the cluster of a joblib backend that has one: the running one, or one made here.

    Dask's is named by `DASK_SCHEDULER_ADDRESS`, Ray's by `RAY_ADDRESS`. Its workers need capproof,
    and the trees at the same paths.

    Raises:
        ImportError: Its library is not installed.
        OSError: It does not answer.
    """
    if backend == "dask":
        dask, distributed = import_module("dask"), import_module("distributed")
        named = dask.config.get("scheduler-address", None)
        of_one_made_here = {"n_workers": jobs, "threads_per_worker": 1, "dashboard_address": None}
        with distributed.Client(named, **({} if named else of_one_made_here)):
            yield
    elif backend == "ray":
        ray = import_module("ray")
        ray.init(ignore_reinit_error=True, log_to_driver=False)
        import_module("ray.util.joblib").register_ray()
        try:
            yield
        finally:
            ray.shutdown()
    else:
        yield


def _journal(journal: Path | None, heading: str) -> dict[str, list[int]]:
    """Numbers of the parts that are done; a line that was cut off is lived again.

    Raises:
        DriverError: The file is something else.
    """
    if journal is None or not journal.exists():
        return {}
    done: dict[str, list[int]] = {}
    *lines, cut_off = journal.read_text().split("\n")
    try:
        if cut_off and not cut_off.startswith("["):
            raise ValueError
        for line in lines:
            of, prefix, (num_states, num_lives, num_known) = json.loads(line)
            if of == heading:
                done[prefix] = [num_states, num_lives, num_known]
    except (ValueError, TypeError):
        raise DriverError(f"{journal}: not a journal of capproof explore; name another") from None
    if cut_off:
        journal.write_text("".join(f"{line}\n" for line in lines))
    return done


def tight(driver: Driver, setting: Setting) -> Setting:
    """The same on the least pool that the largest request fits by itself."""
    pool = driver.shared_pool(replace(setting, num_gpu_blocks=2))
    most = max(pool.most_blocks(request) for request in pool.requests)
    return replace(setting, num_gpu_blocks=most + 1)
