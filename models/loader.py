"""Load the KV-cache core of any vLLM tree with nothing installed.

The core is a handful of modules that count blocks and touch no tensor. They are executed from their
files, under names of their own, with an ``__import__`` of their own: the standard library is real,
the core resolves inside the same tree, and everything else is a :class:`Placeholder`. Several trees
therefore live side by side in one process, and neither the host's ``vllm`` nor its entry in
``sys.modules`` is seen or changed.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
INTERFACE = "vllm.v1.kv_cache_interface"
BLOCK_POOL = "vllm.v1.core.block_pool"
KV_CACHE_UTILS = "vllm.v1.core.kv_cache_utils"
COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
KV_CACHE_MANAGER = "vllm.v1.core.kv_cache_manager"
REQUEST = "vllm.v1.request"

_HOME_OF = {
    "MambaManager": MANAGERS,
    "FullAttentionManager": MANAGERS,
    "MambaSpec": INTERFACE,
    "FullAttentionSpec": INTERFACE,
    "BlockPool": BLOCK_POOL,
}
#: Modules executed for real; the rest of vLLM and every third-party package is a placeholder.
CORE_MODULES = frozenset(
    {
        MANAGERS,
        INTERFACE,
        BLOCK_POOL,
        KV_CACHE_UTILS,
        COORDINATOR,
        KV_CACHE_MANAGER,
        REQUEST,
        "vllm.utils.math_utils",
        "vllm.v1.core.kv_cache_metrics",
        "vllm.v1.hisparse.block_pool",
        "vllm.v1.kv_cache_spec_registry",
    }
)

#: What the core asks outside of it while a `KVCacheManager` is built: the answers where no engine
#: is configured, no variable of the environment is set and the platform adds nothing.
_WITHOUT_ENGINE: Mapping[str, Any] = {
    "vllm.config.get_current_vllm_config_or_none": lambda: None,
    "vllm.envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL": None,
    "vllm.platforms.current_platform.register_custom_kv_cache_specs": lambda vllm_config: None,
}

_trees = itertools.count()


class CoreError(Exception):
    """The tree's KV-cache core cannot be loaded; one line saying what and where."""


class PlaceholderUsed(BaseException):
    """Core code asked something outside the core for a value after loading was over.

    No `Exception`, so that no `except Exception` of the core can turn it into a guess.
    """


class _Loading:
    """Whether a tree is still being executed; placeholders are lenient only until then."""

    def __init__(self) -> None:
        self.done = False


class _OutsideCore:
    """Base class of core classes that derive from something outside the core."""


class Placeholder:
    """Stands for a name outside the core.

    While the tree loads it may be subclassed, subscripted, called and used as a decorator, since
    module bodies do all of these. Afterwards a value that depends on it is an error, never a guess.
    """

    def __init__(self, name: str, loading: _Loading) -> None:
        self._name, self._loading = name, loading

    def __repr__(self) -> str:
        return f"<outside the core: {self._name}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self._name}.{name}"
        if full_name in _WITHOUT_ENGINE:
            return _WITHOUT_ENGINE[full_name]
        return Placeholder(full_name, self._loading)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (_OutsideCore,)

    def __instancecheck__(self, instance: object) -> bool:
        self._only_while_loading("asked for its instances")
        return False

    def __subclasscheck__(self, subclass: type) -> bool:
        self._only_while_loading("asked for its subclasses")
        return False

    def __eq__(self, other: object) -> bool:
        self._only_while_loading("compared")
        return self is other

    def __hash__(self) -> int:
        self._only_while_loading("hashed")
        return id(self)

    def __str__(self) -> str:
        self._only_while_loading("turned into text")
        return repr(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what is decorated, or this again: all that module bodies need."""
        self._only_while_loading("called")
        is_decorated = len(args) == 1 and isinstance(args[0], (types.FunctionType, type))
        return args[0] if is_decorated and not kwargs else self

    def __or__(self, other: object) -> Placeholder:
        return self

    __ror__ = __or__

    def __getitem__(self, key: object) -> Placeholder:
        self._only_while_loading("subscripted")
        return self

    def __bool__(self) -> bool:
        self._only_while_loading("tested")
        return False

    def __iter__(self) -> Iterator[Any]:
        self._only_while_loading("iterated")
        return iter(())

    def __index__(self) -> NoReturn:
        raise PlaceholderUsed(f"{self._name} was used as a number")

    def _only_while_loading(self, how: str) -> None:
        if self._loading.done:
            raise PlaceholderUsed(f"{self._name} is outside the core and was {how}")


class _SilentLogger:
    """What ``init_logger`` gives: every method accepts anything and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class Core:
    """The loaded core of one tree.

    Args:
        root: Folder holding ``vllm/``.
        rewrite: Applied to each module's syntax tree before it is compiled.
        overrides: Names that replace builtins inside the core's modules.

    Raises:
        CoreError: The tree has no KV-cache core, or a module of it cannot be executed.
    """

    def __init__(
        self,
        root: Path,
        *,
        rewrite: Callable[[ast.Module], ast.Module] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self.root = Path(root)
        self._prefix = f"_capproof_tree{next(_trees)}."
        self._rewrite = rewrite
        self._loading = _Loading()
        self._modules: dict[str, types.ModuleType] = {}
        self._stored: frozenset[str] | None = None
        self._text: ast.Module | None = None
        self._builtins = {**vars(builtins), "__import__": self._import, **(overrides or {})}
        if self.file_of(MANAGERS) is None:
            missing = _relative(MANAGERS)
            raise CoreError(f"{self.root}: no KV-cache core here ({missing} is missing)")
        self.managers = self.module(MANAGERS)
        self.interface = self.module(INTERFACE)
        self.block_pool = self.module(BLOCK_POOL)
        self.kv_cache_utils = self.module(KV_CACHE_UTILS)

    def module(self, name: str) -> types.ModuleType:
        """Return a core module of this tree, executed when it is first asked for.

        Raises:
            CoreError: It is missing, or it cannot be executed.
        """
        if name in self._modules:
            return self._modules[name]
        self._loading.done = False
        try:
            return self._load(name)
        except CoreError:
            raise
        except Exception as error:
            where = self.location(error) or str(self.root)
            raise CoreError(f"{where}: {type(error).__name__}: {error}") from error
        finally:
            self._loading.done = True

    def symbol(self, module: str, name: str) -> Any:
        """Return ``module.name`` of this tree.

        Raises:
            CoreError: The module or the name is not there (renamed in this release?).
        """
        found = self.module(module)
        try:
            return getattr(found, name)
        except AttributeError:
            raise CoreError(f"{found.__file__}: no {name} here (renamed?)") from None

    def symbol_of(self, name: str) -> Any:
        """Return a class of the core by its name alone: `MambaSpec`, `MambaManager`, `BlockPool`.

        Raises:
            CoreError: It is not where vLLM keeps it.
        """
        return self.symbol(_HOME_OF[name], name)

    def symbol_of_manager(self, manager: str, method: str) -> Any:
        """Return a manager's own method; an inherited one counts by another manager's rule.

        Raises:
            CoreError: The manager or the method is not there (renamed in this release?).
        """
        kinds = self.symbol_of(manager).__mro__
        own = (vars(kind).get(method) for kind in kinds if kind.__name__ == manager)
        found = next(filter(None, own), None)
        if found is None:
            file = self.file_of(_HOME_OF[manager])
            raise CoreError(f"{file}: no {manager}.{method} here (renamed?)")
        return found

    def file_of(self, module: str) -> Path | None:
        """The file of a core module of this tree, or None where the tree has none."""
        path = self.root / _relative(module)
        return path if path.is_file() else None

    def location(self, error: BaseException) -> str | None:
        """``file:line`` of the innermost frame of ``error`` that lies in this tree."""
        found = None
        traceback = error.__traceback__
        while traceback is not None:
            file = traceback.tb_frame.f_code.co_filename
            if Path(file).is_relative_to(self.root):
                found = f"{Path(file).relative_to(self.root)}:{traceback.tb_lineno}"
            traceback = traceback.tb_next
        return found

    def attributes_stored_after_init(self) -> frozenset[str]:
        """Names of attributes that a manager may be given by anything but its ``__init__``.

        What the managers' own methods store on ``self`` counts, and what any code of the core
        stores on another object, such as the coordinator on its managers. Requests store nothing
        on managers.
        """
        if self._stored is None:
            names: set[str] = set()
            for module in CORE_MODULES - {REQUEST}:
                file = self.file_of(module)
                if file is not None:
                    names |= _stored_attributes(
                        ast.parse(file.read_bytes(), filename=str(file)), module == MANAGERS
                    )
            self._stored = frozenset(names)
        return self._stored

    def names_in_class(self, name: str) -> frozenset[str]:
        """Names of attributes, arguments and methods that the text of a class of managers holds."""
        return frozenset(_names(self._node(name)))

    def names_in_method(self, name: str, method: str) -> frozenset[str]:
        """The same for one method of it; empty where the class does not define it."""
        found = (n for n in self._node(name).body if getattr(n, "name", None) == method)
        return frozenset().union(*map(_names, found))

    def _node(self, name: str) -> ast.ClassDef:
        file = self.file_of(MANAGERS)
        assert file is not None
        if self._text is None:
            self._text = ast.parse(file.read_bytes(), filename=str(file))
        for node in self._text.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
        raise CoreError(f"{file}: no {name} here (renamed?)")

    def close(self) -> None:
        """Forget the tree's modules."""
        for name in self._modules:
            sys.modules.pop(self._prefix + name, None)
        self._modules.clear()

    def _load(self, name: str) -> types.ModuleType:
        if name in self._modules:
            return self._modules[name]
        file = self.file_of(name)
        if file is None:
            raise CoreError(f"{self.root}: {_relative(name)} is missing")
        module = types.ModuleType(self._prefix + name)
        module.__file__ = str(file)
        module.__package__ = name.rpartition(".")[0]
        vars(module)["__builtins__"] = self._builtins
        self._modules[name] = sys.modules[module.__name__] = module
        try:
            tree = ast.parse(file.read_bytes(), filename=str(file))
            if self._rewrite is not None:
                tree = ast.fix_missing_locations(self._rewrite(tree))
            exec(compile(tree, str(file), "exec", dont_inherit=True), vars(module))
        except BaseException:
            del self._modules[name], sys.modules[module.__name__]
            raise
        return module

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: tuple[str, ...] | None = (),
        level: int = 0,
    ) -> Any:
        if level:
            package = (globals or {})["__package__"].split(".")
            name = ".".join([*package[: len(package) - level + 1], *filter(None, [name])])
        if name.partition(".")[0] in sys.stdlib_module_names:
            return builtins.__import__(name, globals, locals, fromlist or (), 0)
        if not fromlist:
            return Placeholder(name.partition(".")[0], self._loading)
        if name == "vllm.logger":
            return types.SimpleNamespace(**dict.fromkeys(fromlist, lambda *_: _SilentLogger()))
        if name in CORE_MODULES and self.file_of(name) is not None:
            return self._load(name)
        return Placeholder(name, self._loading)


def _names(node: ast.AST) -> set[str]:
    """Names of attributes, arguments and functions in a piece of source."""
    found = set()
    for inner in ast.walk(node):
        named = getattr(inner, "attr", None) or getattr(inner, "arg", None)
        found.add(named if isinstance(named, str) else getattr(inner, "name", None))
    return {name for name in found if isinstance(name, str)}


def _stored_attributes(tree: ast.Module, own_too: bool) -> set[str]:
    """Attributes stored on other objects; with ``own_too`` also on self, outside ``__init__``."""
    names = set()
    waiting: list[tuple[ast.AST, bool]] = [(tree, own_too)]
    while waiting:
        node, own_counts = waiting.pop()
        if isinstance(node, ast.FunctionDef):
            own_counts = own_too and node.name != "__init__"
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if own_counts or not is_own:
                names.add(node.attr)
        waiting += [(child, own_counts) for child in ast.iter_child_nodes(node)]
    return names


def _relative(module: str) -> str:
    return module.replace(".", "/") + ".py"
