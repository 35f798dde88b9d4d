from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from models.lift import lifted_core
from models.loader import (
    BLOCK_POOL,
    CORE_MODULES,
    INTERFACE,
    KV_CACHE_MANAGER,
    MANAGERS,
    REQUEST,
    Core,
    CoreError,
    Placeholder,
    PlaceholderUsed,
    _Loading,
)


def file_of(module: str) -> str:
    return module.replace(".", "/") + ".py"


@pytest.fixture
def edited(trees: Mapping[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Copies the core of 0.31.0 and edits one of its modules."""

    def edit(module: str, change: Callable[[str], str]) -> Path:
        for name in CORE_MODULES:
            source = trees["0.31.0"] / file_of(name)
            if source.is_file():
                copied = tmp_path / file_of(name)
                copied.parent.mkdir(parents=True, exist_ok=True)
                text = source.read_text()
                copied.write_text(change(text) if name == module else text)
        return tmp_path

    return edit


def test_trees_live_side_by_side(trees: Mapping[str, Path]) -> None:
    """Two releases, one of them twice, share no class and leave the host's modules alone."""
    before = {name for name in sys.modules if name.partition(".")[0] == "vllm"}
    cores = [Core(trees["0.30.0"]), Core(trees["0.31.0"]), Core(trees["0.31.0"])]

    managers = [core.symbol_of("MambaManager") for core in cores]
    assert len(set(managers)) == 3
    for core, manager in zip(cores, managers, strict=True):
        assert Path(sys.modules[manager.__module__].__file__ or "").is_relative_to(core.root)
    assert {name for name in sys.modules if name.partition(".")[0] == "vllm"} == before


def test_a_closed_tree_leaves_no_modules(trees: Mapping[str, Path]) -> None:
    """What a tree put into `sys.modules` goes with it."""
    before = set(sys.modules)
    core = Core(trees["0.31.0"])
    assert set(sys.modules) - before

    core.close()

    assert {name for name in set(sys.modules) - before if "capproof_tree" in name} == set()


def test_a_folder_without_a_core_is_named(tmp_path: Path) -> None:
    """A folder without vLLM is an error that names it and the missing file."""
    with pytest.raises(CoreError, match=r"no KV-cache core here \(vllm/v1/core/single_type"):
        Core(tmp_path)


@pytest.mark.parametrize(
    ("module", "line", "message"),
    [
        (MANAGERS, "def broken(:", r"SyntaxError: .*single_type_kv_cache_manager\.py, line \d+"),
        (INTERFACE, "x = {}['absent']", r"kv_cache_interface\.py:\d+: KeyError"),
        (BLOCK_POOL, "assert False, 'wrong'", r"block_pool\.py:\d+: AssertionError: wrong"),
    ],
)
def test_a_module_that_cannot_be_executed_is_named(
    edited: Callable[..., Path], module: str, line: str, message: str
) -> None:
    """What goes wrong while a tree loads is one error, with the file and the line."""
    root = edited(module, lambda text: f"{text}\n{line}\n")

    with pytest.raises(CoreError, match=message) as caught:
        Core(root)
    assert "\n" not in str(caught.value)


def test_a_module_is_executed_when_it_is_first_asked_for(edited: Callable[..., Path]) -> None:
    """One that is broken is named each time, hinders no other, and leaves placeholders strict."""
    core = Core(edited(KV_CACHE_MANAGER, lambda text: f"{text}\nassert False, 'wrong'\n"))

    for _ in range(2):
        with pytest.raises(CoreError, match=r"kv_cache_manager\.py:\d+: AssertionError: wrong"):
            core.module(KV_CACHE_MANAGER)
    assert core.module(REQUEST).RequestStatus.WAITING
    with pytest.raises(PlaceholderUsed, match="was called"):
        core.managers.MEDIUM_CPU()


def test_without_an_engine_nothing_is_configured() -> None:
    """The few questions of a `KVCacheManager` that is being built have answers, others do not."""
    loading = _Loading()
    loading.done = True
    config, platforms = (
        Placeholder(f"vllm.{name}", loading) for name in ("config", "platforms.current_platform")
    )

    assert config.get_current_vllm_config_or_none() is None
    assert platforms.register_custom_kv_cache_specs(None) is None
    assert Placeholder("vllm", loading).envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL is None
    with pytest.raises(PlaceholderUsed, match=r"get_current_vllm_config is outside the core"):
        config.get_current_vllm_config()


def test_a_missing_symbol_is_named(edited: Callable[..., Path]) -> None:
    """A class or method that a release renamed is an error that names it and its file."""
    core = Core(edited(MANAGERS, lambda text: text.replace("class MambaManager", "class Other")))
    with pytest.raises(CoreError, match=r"kv_cache_manager\.py: no MambaManager here"):
        core.symbol_of("MambaManager")

    with pytest.raises(CoreError, match=r"MambaSpec\.missing here"):
        core.symbol_of_manager("MambaSpec", "missing")


def test_a_missing_core_module_is_outside(edited: Callable[..., Path]) -> None:
    """A module that moved is a placeholder: loading goes on, using it does not."""
    root = edited("vllm.utils.math_utils", lambda text: text)
    (root / file_of("vllm.utils.math_utils")).unlink()
    core = Core(root)

    with pytest.raises(PlaceholderUsed, match=r"math_utils\.cdiv"):
        core.managers.cdiv(3, 2)


def test_an_error_is_located_in_the_tree(trees: Mapping[str, Path]) -> None:
    """The innermost frame of the tree is named, relative to it; foreign errors have none."""
    core = Core(trees["0.31.0"])
    try:
        core.symbol(INTERFACE, "is_mamba_prefill_checkpoint_valid")(1, 2, 1, 1, 1, 0)
    except AssertionError as error:
        location = str(core.location(error))
    assert location.startswith("vllm/v1/kv_cache_interface.py:")
    source = (core.root / "vllm/v1/kv_cache_interface.py").read_text().splitlines()
    assert "assert checkpoint_alignment > 0" in source[int(location.partition(":")[2]) - 1]
    assert core.location(ValueError("not raised")) is None


USES: dict[str, Callable[[Any], Any]] = {
    "called": lambda p: p(),
    "a method called": lambda p: p.method(1),
    "tested": bool,
    "negated": lambda p: not p,
    "compared": lambda p: p == 1,
    "compared the other way": lambda p: p == "x",
    "told apart": lambda p: p != 1,
    "hashed": lambda p: {p: 1},
    "looked for": lambda p: p in [1, 2],
    "iterated": list,
    "subscripted": lambda p: p[0],
    "asked for instances": lambda p: isinstance(1, p),
    "asked for subclasses": lambda p: issubclass(int, p),
    "text": str,
    "formatted": lambda p: f"{p}",
    "a number": lambda p: [1, 2][p],
    "an attribute's attribute tested": lambda p: bool(p.a.b),
}


@pytest.mark.parametrize("use", USES)
def test_nothing_outside_the_core_has_a_value(use: str) -> None:
    """After loading, every use of a name outside the core is an error, never an answer."""
    loading = _Loading()
    placeholder = Placeholder("torch.Tensor", loading)
    loading.done = True

    with pytest.raises(PlaceholderUsed, match=r"torch\.Tensor"):
        USES[use](placeholder)


@pytest.mark.parametrize("use", [lambda p: p + 1, lambda p: p < 1, len, lambda p: p / 2])
def test_arithmetic_outside_the_core_fails(use: Callable[[Any], Any]) -> None:
    """What a placeholder does not define, Python refuses."""
    with pytest.raises(TypeError):
        use(Placeholder("torch.Tensor", _Loading()))


def test_module_bodies_may_use_placeholders() -> None:
    """Until loading is over a placeholder is base class, decorator, annotation and alias."""
    outside: Any = Placeholder("torch.nn.Module", _Loading())

    class Derived(outside): ...

    @outside
    def decorated() -> int:
        return 7

    assert Derived() is not None
    assert decorated() == 7
    assert isinstance(outside[int] | None, Placeholder)
    assert outside("argument") is outside
    assert not isinstance(1, outside)


def test_no_exception_handler_of_the_core_catches_a_placeholder() -> None:
    """`except Exception` in the core cannot turn the use of a placeholder into a guess."""
    assert not issubclass(PlaceholderUsed, Exception)


def test_what_may_change_after_init_is_known(edited: Callable[..., Path]) -> None:
    """Stores by methods and by other parts of vLLM are found, those of `__init__` are not."""
    lines = "    def later(self): self.counted: int = 1; del self.dropped\n"
    core = Core(edited(MANAGERS, lambda text: text.replace("    @classmethod\n", lines, 1)))

    stored = core.attributes_stored_after_init()
    assert {"counted", "dropped", "use_eagle", "drop_eagle_checkpoint_block"} <= stored
    assert not {"num_speculative_blocks", "req_to_blocks", "mamba_cache_mode"} & stored
    # `Request` stores it on a structured output request.
    assert "reasoning_ended" not in stored


def test_lifting_keeps_the_tree_loadable(trees: Mapping[str, Path]) -> None:
    """Rewritten modules define the same names as the originals."""
    for root in trees.values():
        lifted, native = lifted_core(root), Core(root)
        for name in ("managers", "interface", "block_pool", "kv_cache_utils"):
            assert vars(getattr(lifted, name)).keys() == vars(getattr(native, name)).keys()
