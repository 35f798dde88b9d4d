"""Find in a vLLM tree what the driver needs, and build it with the arguments that the tree takes.

Releases differ in these arguments. They are read from the signatures, once per tree, so that a
release nobody described works too; what is missing is named with its file.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from models.loader import BLOCK_POOL, INTERFACE, MANAGERS
from spec.vocabulary import Call, Geometry

#: Methods that a class must define itself: the inherited ones count blocks by another rule, so
#: falling back to them after a renaming would silently test the wrong function.
OWN_METHODS = {"MambaManager": ("get_num_blocks_to_allocate", "allocate_new_blocks")}

#: Methods that a class has, its own or inherited.
METHODS = {
    "MambaManager": ("new_step_starts", "remove_skipped_blocks", "free"),
    "BlockPool": ("get_num_free_blocks", "get_new_blocks", "free_blocks", "touch", "evict_blocks"),
    "KVCacheCoordinator": (
        "get_num_blocks_to_allocate",
        "remove_skipped_blocks",
        "cache_blocks",
        "free",
        "new_step_starts",
    ),
    "KVCacheManager": ("allocate_slots",),
}

#: Private attributes of a manager that hold checkpoints pending from the last estimate, by the
#: names that releases give them (the second is 0.29.0's); before 0.29.0 there are none.
PENDING_CHECKPOINTS = ("_checkpoints", "_num_checkpoint_blocks")

#: Methods of a manager that came with hits and own tails that end inside a block, in 0.26.0.
HAS_PARTIAL_HIT = "_has_partial_local_hit"
CACHE_PARTIAL_TAIL = "_cache_partial_tail_block"
CACHED_THIS_STEP = "cached_blocks_this_step"
#: 0.26.0: what a removal is told, which spares what steps in flight read.
PROCESSED_TOKENS = "processed_computed_tokens"

#: Private attribute of a manager that holds a request's partial block to copy on write.
PARTIAL_HITS = "_partial_hit_reqs"

#: Private attribute of a manager that holds copies on write, source and target, until they are run.
QUEUED_COPIES = "_pending_cow_copies"

#: Private attribute of a manager that holds the column to free next, by request.
COLUMN_TO_RETIRE = "last_state_block_idx"


class DriverError(Exception):
    """The step cannot be run, through no doing of the code under test; one line."""


class BindingError(DriverError):
    """The tree cannot be driven; one line with the file and the symbol."""


class Modules(Protocol):
    """Where the classes under test come from; `models.loader.Core` is one."""

    @property
    def managers(self) -> Any:
        """`vllm.v1.core.single_type_kv_cache_manager`."""

    @property
    def interface(self) -> Any:
        """`vllm.v1.kv_cache_interface`."""

    @property
    def block_pool(self) -> Any:
        """`vllm.v1.core.block_pool`."""

    def module(self, name: str) -> Any:
        """Another module of the KV-cache core, by its vLLM name."""


@dataclass(frozen=True)
class ImportedModules:
    """Modules of a vLLM that is really imported."""

    managers: Any
    interface: Any
    block_pool: Any
    state_dtype: Any
    """`torch.float32`; the element type that the spec is built with."""
    location: str
    """Folder of the imported package, and torch's version."""

    def module(self, name: str) -> Any:
        """Import another module of the KV-cache core, by its vLLM name."""
        return importlib.import_module(name)


@dataclass(frozen=True)
class Bindings:
    """Classes of one tree, and which of the known arguments each callable takes."""

    spec_class: Callable[..., Any]
    pool_class: Callable[..., Any]
    manager_class: Callable[..., Any]
    spec_arguments: frozenset[str]
    pool_arguments: frozenset[str]
    manager_arguments: frozenset[str]
    estimator_call_fields: tuple[str, ...]
    """Fields of `Call` that the estimator takes; `prefill_end` from 0.31.0."""
    allocator_call_fields: tuple[str, ...]
    state_dtype: Any
    """Element type of the states; nothing that counts blocks reads it."""
    file: str
    """File of the managers."""
    pool_file: str
    """File of the block pool."""

    def new_spec(self, geometry: Geometry) -> Any:
        """Return an align-mode `MambaSpec`.

        Raises:
            BindingError: The geometry has checkpoint blocks, and the release has none.
        """
        values = _spec_values(geometry, self.state_dtype)
        name = "num_prefill_checkpoint_blocks"
        if geometry.num_prefill_checkpoint_blocks and name not in self.spec_arguments:
            raise BindingError(f"{self.file}: this release has no MambaSpec.{name}")
        return self.spec_class(**taken(values, self.spec_arguments))

    def new_pool(self, num_gpu_blocks: int, hash_block_size: int, num_lookahead: int = 0) -> Any:
        """Return a `BlockPool` with prefix caching.

        Args:
            num_gpu_blocks: Blocks, null block included.
            hash_block_size: Tokens per hash unit.
            num_lookahead: Tokens behind a hash unit that its hash covers too.

        Raises:
            BindingError: Hashes are to look ahead, and those of the release do not.
        """
        name = "num_hash_lookahead_tokens"
        if num_lookahead and name not in self.pool_arguments:
            raise BindingError(f"{self.pool_file}: this release has no BlockPool.{name}")
        values = _pool_values(num_gpu_blocks, hash_block_size, num_lookahead)
        return self.pool_class(**taken(values, self.pool_arguments))

    def new_manager(self, geometry: Geometry, spec: Any, pool: Any) -> Any:
        """Return a `MambaManager` of the only group.

        Raises:
            BindingError: The geometry has the EAGLE drop or an alignment of hits, and the release
                has none.
        """
        values = _manager_values(geometry, spec, pool)
        manager = self.manager_class(**taken(values, self.manager_arguments))
        self.set_as_coordinator_does(geometry, manager)
        return manager

    def set_as_coordinator_does(self, geometry: Geometry, manager: Any) -> None:
        """Give a `MambaManager` what the coordinator sets after it has built its managers.

        Raises:
            BindingError: The geometry has the EAGLE drop or an alignment of hits, and the release
                has none.
        """
        if geometry.drop_eagle_checkpoint_block:
            self.need("drop_eagle_checkpoint_block", manager)
            manager.drop_eagle_checkpoint_block = True
        name, alignment = "cache_hit_alignment_tokens", geometry.cache_hit_alignment_tokens
        if alignment != geometry.hash_block_size:
            self.need(name, manager)
        if hasattr(manager, name):
            setattr(manager, name, alignment)

    def need(self, name: str, manager: Any) -> None:
        """Refuse a release whose managers lack an attribute or a method.

        Raises:
            BindingError: It does.
        """
        if not hasattr(manager, name):
            raise BindingError(f"{self.file}: this release has no MambaManager.{name}")

    def need_argument(self, name: str, method: Callable[..., Any]) -> None:
        """Refuse a release whose method is not told something.

        Raises:
            BindingError: It is not.
        """
        if name not in inspect.signature(method).parameters:
            raise BindingError(f"{self.file}: {method.__qualname__} of this release has no {name}")

    def call(
        self, owner: Any, method: str, values: Mapping[str, Any], optional: Sequence[str] = ()
    ) -> Any:
        """Call a method of a part of the tree with those of the values that it takes.

        Args:
            owner: A manager, a pool, a coordinator.
            method: Name of the method.
            values: Arguments by name.
            optional: Names of arguments that not every release takes.

        Raises:
            BindingError: The method is missing, does not take an argument that is not optional, or
                requires one that is not given.
        """
        file, name = file_of(sys.modules.get(owner.__module__)), owner.__class__.__name__
        function = getattr(owner, method, None)
        if not callable(function):
            raise BindingError(f"{file}: no {name}.{method} here (renamed?)")
        needed = [value for value in values if value not in optional]
        accepted = accepted_arguments(function, values, f"{file}: {name}.{method}", needed)
        return function(**taken(values, accepted))


def bind(modules: Modules) -> Bindings:
    """Find what the driver needs in a tree.

    Raises:
        BindingError: A class, a method or a known argument is missing, or an argument is required
            that the driver does not know.
    """
    manager_class = find_class(modules.managers, "MambaManager")
    spec_class = find_class(modules.interface, "MambaSpec")
    pool_class = find_class(modules.block_pool, "BlockPool")
    return Bindings(
        spec_class=spec_class,
        pool_class=pool_class,
        manager_class=manager_class,
        spec_arguments=accepted_arguments(
            spec_class,
            _spec_values(ANY_GEOMETRY, None),
            f"{file_of(modules.interface)}: MambaSpec",
            needed=["block_size", "mamba_cache_mode", "num_speculative_blocks"],
        ),
        pool_arguments=accepted_arguments(
            pool_class,
            _pool_values(1, 1, 0),
            f"{file_of(modules.block_pool)}: BlockPool",
            needed=["num_gpu_blocks"],
        ),
        manager_arguments=_check_parameters(
            _constructor_parameters(manager_class),
            _manager_values(ANY_GEOMETRY, None, None),
            f"{file_of(modules.managers)}: MambaManager",
            needed=["kv_cache_spec", "block_pool"],
        ),
        estimator_call_fields=_call_fields(
            modules.managers,
            "get_num_blocks_to_allocate",
            ["request_id", "new_computed_blocks", "apply_admission_cap"],
        ),
        allocator_call_fields=_call_fields(modules.managers, "allocate_new_blocks", ["request_id"]),
        state_dtype=getattr(modules, "state_dtype", None),
        file=file_of(modules.managers),
        pool_file=file_of(modules.block_pool),
    )


def import_vllm(root: Path | None = None) -> ImportedModules:
    """Import the KV-cache modules for real.

    Args:
        root: Folder that must hold the imported `vllm/`; None accepts whichever is on the path.

    Raises:
        BindingError: vLLM or torch cannot be imported, or another vLLM was found first.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The tree's and its packages' are not ours to judge.
            torch = importlib.import_module("torch")
            vllm = importlib.import_module("vllm")
            managers, interface, block_pool = map(
                importlib.import_module, (MANAGERS, INTERFACE, BLOCK_POOL)
            )
    except Exception as error:  # Importing runs the tree's own code, which may raise anything.
        raise BindingError(f"vllm tier: {one_line(error)}") from error
    package = Path(str(vllm.__file__)).resolve().parent
    if root is not None and package != (Path(root) / "vllm").resolve():
        raise BindingError(f"vllm tier: {package} was imported instead of {Path(root) / 'vllm'}")
    location = f"{package}, torch {torch.__version__}"
    return ImportedModules(managers, interface, block_pool, torch.float32, location)


def file_of(module: Any) -> str:
    """Return the file of a module, for an error to name."""
    return str(getattr(module, "__file__", module))


def find_class(module: Any, name: str) -> Any:
    """Return a class of a module, if it has the methods that the driver calls.

    Raises:
        BindingError: The class, or one of them, is missing.
    """
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise BindingError(f"{file_of(module)}: no {name} here (renamed?)")
    own, any_method = OWN_METHODS.get(name, ()), METHODS.get(name, ())
    absent = [method for method in own if method not in vars(found)]
    absent += [method for method in any_method if not callable(getattr(found, method, None))]
    if absent:
        raise BindingError(f"{file_of(module)}: no {name}.{absent[0]} here (renamed?)")
    return found


def _call_fields(managers: Any, method: str, needed: Sequence[str]) -> tuple[str, ...]:
    """The fields of `Call` that a method of `MambaManager` takes."""
    call_fields = [field.name for field in fields(Call)]
    accepted = accepted_arguments(
        getattr(managers.MambaManager, method),
        [*needed, *call_fields],
        f"{file_of(managers)}: MambaManager.{method}",
        needed=needed,
    )
    return tuple(name for name in call_fields if name in accepted)


def accepted_arguments(
    function: Callable[..., Any], known: Iterable[str], where: str, needed: Sequence[str]
) -> frozenset[str]:
    """The names among `known` that `function` takes."""
    parameters = inspect.signature(function).parameters.values()
    return _check_parameters(
        [parameter for parameter in parameters if parameter.name != "self"], known, where, needed
    )


def _constructor_parameters(cls: Any) -> list[inspect.Parameter]:
    """The parameters of a constructor, with those of the bases it hands `**kwargs` on to."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in (base for base in cls.__mro__ if "__init__" in vars(base)):
        found = list(inspect.signature(base.__init__).parameters.values())[1:]
        for parameter in found:
            parameters.setdefault(parameter.name, parameter)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in found):
            break
    return list(parameters.values())


def _check_parameters(
    parameters: Sequence[inspect.Parameter],
    known: Iterable[str],
    where: str,
    needed: Sequence[str],
) -> frozenset[str]:
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    accepted = frozenset(known) & {parameter.name for parameter in named}
    for name in needed:
        if name not in accepted:
            raise BindingError(f"{where} takes no {name} (renamed?)")
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in accepted:
            raise BindingError(f"{where} requires {parameter.name}, which the driver does not know")
    return accepted


# Every constructor argument that may be given; a release takes those it knows.

ANY_GEOMETRY = Geometry(1, 1, 0, 0, 1, False)


def _spec_values(geometry: Geometry, state_dtype: Any) -> dict[str, Any]:
    return {
        "block_size": geometry.block_size,
        "shapes": ((1, 1),),
        "dtypes": (state_dtype,),
        "mamba_cache_mode": "align",
        "num_speculative_blocks": geometry.num_speculative_blocks,
        "num_prefill_checkpoint_blocks": geometry.num_prefill_checkpoint_blocks,
        "prefill_checkpoint_alignment": geometry.prefill_checkpoint_alignment,
    }


def _pool_values(num_gpu_blocks: int, hash_block_size: int, num_lookahead: int) -> dict[str, Any]:
    return {
        "num_gpu_blocks": num_gpu_blocks,
        "enable_caching": True,
        "hash_block_size": hash_block_size,
        "num_hash_lookahead_tokens": num_lookahead,
    }


def _manager_values(geometry: Geometry, spec: Any, pool: Any) -> dict[str, Any]:
    return {
        "kv_cache_spec": spec,
        "block_pool": pool,
        "enable_caching": True,
        "kv_cache_group_id": 0,
        "scheduler_block_size": geometry.block_size,
    }


def taken(values: Mapping[str, Any], accepted: frozenset[str]) -> dict[str, Any]:
    """Return those of the arguments that are taken."""
    return {name: value for name, value in values.items() if name in accepted}


def one_line(error: BaseException) -> str:
    """Return type and text of an exception."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
