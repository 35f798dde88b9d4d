"""One step of a release's own code, run natively from the state that a sample of terms describes.

Any state that the assumptions allow is built, whether or not a life from an empty pool gets there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from conformance.driver import Driver, RequestUnderTest
from models.evaluate import Evaluator
from models.lift import Exploration, summary_of
from models.predict import step_in_numbers
from models.prove import in_numbers
from spec.families import family_of, is_decoding
from spec.logic import cdiv
from spec.states import column_of_last_token, running_column
from spec.theorems import THEOREMS
from spec.vocabulary import Call, Situation, Step

REQUEST = "request"
#: Ids that a sample's table gets, so that no block stands in two columns.
FIRST_ID = 1_000
#: In a sample: whether skipped columns are to be null.
TIDY = "is_tidy"
#: Longer tables, and larger pools, are not built.
MOST_BLOCKS = 20_000
_RECORDS = ("_checkpoints", "_num_checkpoint_blocks")

Values = Mapping[str, Any]


def with_own_blocks(exploration: Exploration, values: Values) -> Values:
    """The same sample, with a block of its own in each column that is not null.

    A block that is cached as the request's own tail is one that cannot be moved.
    """
    situation = in_numbers(exploration.situation, Evaluator(values))
    ids, movable = values.get("block_table", {}), values.get("block_is_movable", {})
    columns = range(situation.table_length)
    if values.get(TIDY):
        ids = {i: 0 if _is_skipped(situation, i) else ids.get(i, 1) for i in columns}
    movable = {i: int(movable.get(i, 1) == 1) for i in columns}
    if situation.owns_partial_tail:
        movable[column_of_last_token(situation)] = 0
    needed = cdiv(situation.call.num_tokens_main_model, situation.geometry.block_size)
    return {
        **values,
        "num_gpu_blocks": 2 * (situation.table_length + needed) + 100,
        "block_table": {i: 0 if ids.get(i, 1) == 0 else FIRST_ID + i for i in columns},
        "column_of_block": {FIRST_ID + i: i for i in columns},
        "block_is_movable": movable,
    }


def _is_skipped(situation: Situation, column: int) -> bool:
    """Whether a column holds no block once skipped blocks are removed."""
    is_last = is_decoding(situation) and column == column_of_last_token(situation)
    return bool(column < running_column(situation) and not is_last)


def _is_tidy(situation: Situation, values: Values) -> bool:
    ids = values["block_table"]
    return all(ids[i] == 0 for i in ids if _is_skipped(situation, i))


def lifted_step(exploration: Exploration, values: Values) -> tuple[int, Step] | None:
    """Number of the path taken and what is seen; None where an assumption is broken."""
    path = summary_of(exploration, values)
    if path is None:
        return None
    columns = range(values.get("num_tokens_main_model", 0) + 20)
    return exploration.paths.index(path), step_in_numbers(path.step, values, columns)


def native_step(driver: Driver, situation: Situation, values: Values) -> tuple[Step, int]:
    """Bring a real request into the state, and let it make the step; what the gate said is second.

    Args:
        driver: Of the release.
        situation: In numbers.
        values: Of the variables that stand for the state beside it.
    """
    request = driver.request(situation.geometry, values["num_gpu_blocks"])
    manager: Any = request.manager
    if situation.preempted:
        request.apply(Call(1, 1, 0, 0))
        request.preempt()
    elif situation.table_length:
        _admit(request, parked=situation.parked)
        manager.req_to_blocks[REQUEST] = _table(request, situation, values)
        if situation.geometry.num_speculative_blocks == 0 and values.get("was_parked"):
            manager._allocated_block_reqs.discard(REQUEST)
    _leave_checkpoint(manager, values)
    if situation.table_length:
        _leave_column_to_retire(manager, values)
    if situation.owns_partial_tail:
        _own_tail(request, situation)
    of_this_step = bool(situation.hit_is_of_this_step)
    made_up: Any = request
    made_up._hit = lambda tokens, blocks, evictable: _hit(request, blocks, evictable, of_this_step)
    made_up._check_adoption = lambda *arguments: None
    manager.remove_skipped_blocks = lambda *arguments: None
    gate = _gate(driver, request, situation) if situation.num_request_tokens else 0
    step = request.apply(
        situation.call,
        num_hit_blocks=situation.num_hit_blocks,
        hit_is_evictable=bool(situation.hit_is_evictable),
        num_external_tokens=situation.num_external_tokens,
        loads_asynchronously=bool(situation.loads_asynchronously),
    )
    return step, gate


def _gate(driver: Driver, request: RequestUnderTest, situation: Situation) -> int:
    """What the dry run says of the whole request, on a hit of its own that is taken back."""
    tokens = situation.num_request_tokens
    call = replace(situation.call, num_tokens=tokens, num_tokens_main_model=tokens)
    arguments = {name: getattr(call, name) for name in driver.bindings.estimator_call_fields}
    made_up: Any = request
    hits = made_up._hit(0, situation.num_hit_blocks, bool(situation.hit_is_evictable))
    estimate: int = made_up._estimate(arguments, hits, is_dry_run=True)
    if hits and hits[-1].ref_cnt:
        request.pool.free_blocks(hits[-1:])
    return estimate


def _admit(request: RequestUnderTest, *, parked: bool) -> None:
    if parked:
        request.apply(Call(1, 1, 1, 0), num_external_tokens=1, loads_asynchronously=True)
    else:
        request.apply(Call(1, 1, 0, 0))


def _table(request: RequestUnderTest, situation: Situation, values: Values) -> list[Any]:
    ids, movable = values["block_table"], values["block_is_movable"]
    pool, table = request.pool, []
    for column in range(situation.table_length):
        if ids[column] == 0:
            table.append(pool.null_block)
            continue
        (block,) = pool.get_new_blocks(1)
        if not movable[column]:
            pool.touch([block])
        table.append(block)
    return table


def _leave_checkpoint(manager: Any, values: Values) -> None:
    is_pending = values.get("has_checkpoint_before", False)
    positions, counts = (getattr(manager, name, None) for name in _RECORDS)
    if positions is not None:
        positions.pop(REQUEST, None)
        if is_pending:
            where = values.get("checkpoint_before", 1), values.get("column_before", 0)
            positions[REQUEST] = where
    if counts is not None:
        counts[REQUEST] = int(is_pending)


def _leave_column_to_retire(manager: Any, values: Values) -> None:
    records = manager.last_state_block_idx
    records.pop(REQUEST, None)
    if values.get("has_column_to_retire_before"):
        records[REQUEST] = values.get("column_to_retire_before", 0)


def _own_tail(request: RequestUnderTest, situation: Situation) -> None:
    manager: Any = request.manager
    column, computed = column_of_last_token(situation), situation.call.total_computed_tokens
    block = manager.req_to_blocks[REQUEST][column]
    _cache(request, block, b"own tail", computed)
    manager._partial_hit_reqs[REQUEST] = column, block
    if hasattr(manager, "_producer_partial_tail_reqs"):
        has_block = hasattr(manager, "finalize_partial_tail_offload")
        manager._producer_partial_tail_reqs[REQUEST] = (block, computed) if has_block else computed


def _hit(
    request: RequestUnderTest, num_blocks: int, is_evictable: bool, is_of_this_step: bool
) -> list[Any]:
    if num_blocks == 0:
        return []
    pool: Any = request.pool
    (block,) = pool.get_new_blocks(1)
    _cache(request, block, b"hit", num_blocks)
    if is_evictable:
        pool.free_blocks([block])
    if is_of_this_step:
        request.manager.cached_blocks_this_step.add(block.block_hash)  # type: ignore[attr-defined]
    return [pool.null_block] * (num_blocks - 1) + [block]


def _cache(request: RequestUnderTest, block: Any, block_hash: bytes, num_tokens: int) -> None:
    if hasattr(block, "set_block_hash"):
        block.set_block_hash(block_hash, num_tokens)
    else:
        block.block_hash = block_hash
    request.pool.cached_block_hash_to_block.insert(block_hash, block)


def differences(
    driver: Driver, exploration: Exploration, values: Values
) -> tuple[int, list[str]] | None:
    """Number of the path that a sample takes, and how the native step differs from it.

    None where the sample breaks an assumption, or is too large to build.
    """
    if any(values.get(n, 0) > MOST_BLOCKS for n in ("num_tokens_main_model", "num_hit_blocks")):
        return None
    values = with_own_blocks(exploration, values)
    lifted = lifted_step(exploration, values)
    if lifted is None:
        return None
    number, expected = lifted
    situation = in_numbers(exploration.situation, Evaluator(values))
    seen, gate = native_step(driver, situation, values)
    seen = replace(seen, gate=gate)
    return number, [
        f"{name}: lifted {getattr(expected, name)}, native {getattr(seen, name)}"
        for name in compared(situation, values, expected, seen)
        if getattr(expected, name) != getattr(seen, name)
    ]


def compared(situation: Situation, values: Values, expected: Step, seen: Step) -> set[str]:
    """Fields of a step that both say something about."""
    if expected.deferred:
        # The driver goes on where the scheduler would try again in a later step.
        return {"gate", "dry_run", "estimate", "dry_run_left_state"}
    if expected.raised is not None:
        reached = {n for n in ("dry_run", "estimate", "drawn") if getattr(seen, n) is not None}
        return {"raised", *reached}
    names = set(vars(expected)) - {
        "deferred",
        "removal_kept_state",
        "removal_freed_skipped",
        "removal_freed_ended",
        "removed_blocks",
    }
    if not _is_tidy(situation, values):
        names -= {"held_before", "held", "only_states_are_held"}
    if seen.checkpoint_position is None:
        # 0.29.0 keeps how many blocks a pending checkpoint takes, and not where it lies.
        names -= {"checkpoint_position", "checkpoint_column", "checkpoint_block_is_held"}
    if THEOREMS["new-columns-returned"].why_not(family_of(situation)) is not None:
        names.discard("returned_new_columns")
    return names
