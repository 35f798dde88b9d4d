"""Random lives by Hypothesis: a state machine that applies the rules of lives to one real pool.

It is the machine that the project's own tests, and the runs on changed copies of a release, live.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from conformance.driver import Driver
from conformance.life import Life, Plan, Rule, Setting, Stage
from conformance.life_checks import KNOWN, KnownFault, known_fault
from conformance.life_files import dumps
from conformance.lives import NotPossible, SharedPool
from spec.vocabulary import Geometry

RULES_PER_LIFE = 30
STAGES = tuple(stage for stage in Stage if stage not in (Stage.ENDED, Stage.LEAVING))
#: Stages of the requests that a rule applies to; other rules apply to all that have not ended.
ABLE = {
    "admit": (Stage.WAITING, Stage.PREEMPTED),
    "promote": (Stage.ARRIVED,),
    "run": (Stage.RUNNING,),
    "arrive": (Stage.LOADING, Stage.LEAVING),
    "preempt": (Stage.RUNNING,),
    "finish": (Stage.RUNNING,),
}


@st.composite
def a_setting(draw: Any, checkpoints: tuple[int, ...], steps_in_flight: int) -> Setting:
    """Small sizes: every token count is within a few blocks."""
    block_size = draw(st.sampled_from([2, 4]))
    hash_block_size = draw(st.sampled_from([size for size in (1, 2, 4) if size <= block_size]))
    speculative = 0 if steps_in_flight else draw(st.integers(0, min(2, block_size - 1)))
    short, long = st.integers(1, 3 * block_size + 2), st.integers(6 * block_size, 9 * block_size)
    prompts = st.one_of(short, long)
    shared = st.sampled_from([0, block_size, 99])
    plans = st.builds(Plan, prompts, st.integers(1, 5), shared)
    return Setting(
        geometry=Geometry(
            block_size,
            hash_block_size,
            speculative,
            draw(st.sampled_from(checkpoints)),
            1,
            False,
        ),
        num_gpu_blocks=0,
        plans=tuple(draw(st.lists(plans, min_size=1, max_size=3))),
        num_mamba_groups=draw(st.integers(1, 2)),
        max_num_scheduled_tokens=draw(st.sampled_from([64, 64, 3])),
        num_lookahead_tokens=draw(st.sampled_from([0, speculative])),
        full_sequence_must_fit=draw(st.booleans()),
        num_steps_in_flight=steps_in_flight,
    )


class Lives(RuleBasedStateMachine):
    """Requests share a pool; after every rule no violation may be left that is not known."""

    driver: Driver
    target: str
    save_to: Path | None = None
    checkpoints: tuple[int, ...] = (0, 1)
    steps_in_flight: int = 0
    faults: tuple[KnownFault, ...] = KNOWN
    theorems: tuple[str, ...] = ()
    """What is looked for; empty is everything."""

    pool: SharedPool
    applied: list[Rule]

    @initialize(data=st.data(), slack=st.sampled_from([0, 0, 1, 3]))
    def begin(self, data: Any, slack: int) -> None:
        """Draw a setting, and a pool for it with so many blocks to spare."""
        setting = data.draw(a_setting(self.checkpoints, self.steps_in_flight))
        # A pool that the largest request just fits, or a little more: on others little happens.
        roomy = self.driver.shared_pool(replace(setting, num_gpu_blocks=2))
        least = max(roomy.most_blocks(request) for request in roomy.requests)
        self.pool = self.driver.shared_pool(replace(setting, num_gpu_blocks=1 + least + slack))
        self.applied = []

    def apply(self, name: str, index: int = 0, **values: Any) -> None:
        """Apply a rule to the request that `index` chooses among those that it may apply to."""
        able = [r.number for r in self.pool.requests if r.stage in ABLE.get(name, STAGES)]
        one = Rule(name, able[index % len(able)] if able else 0, **values)
        try:
            self.pool.apply(one)
        except NotPossible:
            return
        self.applied.append(one)
        unknown = [
            violation
            for violation in self.pool.violations
            if known_fault(violation, self.target, self.faults) is None
            and violation.theorem in (self.theorems or (violation.theorem,))
        ]
        if unknown and self.save_to is not None:
            self.save_to.write_text(dumps(Life(self.pool.setting, tuple(self.applied))))
        assert not unknown, str(unknown[0])

    def may(self, name: str) -> bool:
        """Whether the rule may apply to any request."""
        alive = not self.pool.is_dead
        return alive and any(r.stage in ABLE.get(name, STAGES) for r in self.pool.requests)

    request, tokens = st.integers(0, 2), st.integers(1, 40)

    @precondition(lambda self: self.may("admit"))
    @rule(index=request, tokens=tokens, external=st.integers(0, 9), later=st.booleans())
    def admit(self, index: int, tokens: int, external: int, later: bool) -> None:
        """Admit a waiting request, with external tokens that are loaded now or later."""
        self.apply(
            "admit",
            index,
            num_tokens=tokens,
            num_external_tokens=external,
            loads_asynchronously=later,
        )

    @precondition(lambda self: self.may("promote"))
    @rule(index=request, tokens=tokens)
    def promote(self, index: int, tokens: int) -> None:
        """Go on with a request whose load has arrived."""
        self.apply("promote", index, num_tokens=tokens)

    @precondition(lambda self: self.may("run"))
    @rule(index=request, tokens=tokens, accepted=st.integers(0, 2))
    def run(self, index: int, tokens: int, accepted: int) -> None:
        """Schedule more tokens of a running request."""
        self.apply("run", index, num_tokens=tokens, num_accepted=accepted)

    @precondition(lambda self: not self.pool.is_dead and self.pool.is_open)
    @rule()
    def step(self) -> None:
        """Run what was scheduled."""
        self.apply("step")

    @precondition(lambda self: self.may("arrive"))
    @rule(index=request)
    def arrive(self, index: int) -> None:
        """End a load."""
        self.apply("arrive", index)

    @precondition(lambda self: self.may("preempt"))
    @rule(index=request)
    def preempt(self, index: int) -> None:
        """Take a running request's blocks."""
        self.apply("preempt", index)

    @precondition(lambda self: self.may("finish") and not self.pool.is_open)
    @rule(name=st.sampled_from(["finish", "abort", "reset"]), index=request)
    def end(self, name: str, index: int) -> None:
        """Finish or abort a request, or clear what is cached."""
        self.apply(name, index)

    @precondition(lambda self: not self.may("alone"))
    @rule()
    def rest(self) -> None:
        """All requests have ended, or the engine has."""

    @precondition(lambda self: self.may("alone") and not self.pool.is_open)
    @rule(index=request)
    def alone(self, index: int) -> None:
        """End all other requests, and serve one to its end."""
        self.apply("alone", index)


def lived(
    driver: Driver, target: str, lives: int, save_to: Path | None = None, **values: Any
) -> None:
    """Have a machine live.

    Args:
        driver: Of the tree under test.
        target: Whose known faults are excepted.
        lives: How many.
        save_to: Where the life that shows an unknown violation is written.
        values: What else the machine is told: attributes of `Lives`.

    Raises:
        AssertionError: A violation is not known; it names the theorem. What the tree itself raises
            outside what the rules expect is passed on.
    """
    content = {"driver": driver, "target": target, "save_to": save_to, **values}
    run_state_machine_as_test(
        type("Machine", (Lives,), content),
        settings=settings(
            max_examples=lives,
            stateful_step_count=RULES_PER_LIFE,
            phases=(Phase.generate,),
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
