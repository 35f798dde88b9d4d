from __future__ import annotations

import ast
import builtins
import itertools
import traceback
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from models import term
from models.containers import Block, Pool, Table
from models.evaluate import value_of
from models.path import NeedsDecision, Path, following
from models.rewrite import rewrite
from models.runtime import BUILTINS
from models.term import Bool, Int, Unsupported

A = term.int_var("a")
B = term.int_var("b")
C = term.int_var("c")


def module_of(source: str, *, lifted: bool) -> dict[str, Any]:
    """Run a module's source, as it stands or rewritten."""
    tree = ast.parse(source)
    names = dict(vars(builtins))
    if lifted:
        tree = ast.fix_missing_locations(rewrite(tree))
        names.update(BUILTINS)
    name = "_capproof_tree_of_a_test" if lifted else "original"
    module = types.ModuleType(name)
    vars(module)["__builtins__"] = names
    exec(compile(tree, f"{name}.py", "exec"), vars(module))
    return vars(module)


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """What a call returns or raises, and what it wrote into the log that it is given."""
    log: list[Any] = []
    try:
        found = function(log, *args)
    except Exception as error:
        return type(error), str(error), log
    return found, log


#: Functions `f(log, a, b, c)`; `seen(log, x)` returns x and leaves it in the log.
FUNCTIONS = {
    "and returns an operand": "return seen(log, a) and seen(log, b) and seen(log, c)",
    "or returns an operand": "return seen(log, a) or seen(log, b) or seen(log, c)",
    "nested connectives": "return (seen(log, a) and seen(log, b)) or not seen(log, c)",
    "not": "return not a, not not b",
    "a conditional expression": "return seen(log, a) if seen(log, b) > 0 else seen(log, c)",
    "a conditional expression in another": "return a if b > 0 else (b if c > 0 else c)",
    "a chain": "return seen(log, a) < seen(log, b) <= seen(log, c)",
    "a chain stops": "return seen(log, a) < seen(log, b) < seen(log, 1 // c)",
    "a long chain": "return a <= b <= c <= a + 2 != b",
    "a chain with in": "return a < b in [a, b, c]",
    "is": "return a is None, a is not None, None is not a, log is log",
    "is not in a chain": "return log is not None is not a",
    "a comprehension": "return [seen(log, x) for x in (a, b, c)]",
    "a comprehension with a condition": "return [x for x in (a, b, c) if x > 0 and x != b]",
    "a constant comprehension": "return [seen(log, a) for _ in range(b)]",
    "an inner variable in a connective": "return [x > a and x < b for x in range(-3, 4)]",
    "a generator": "return sum(x for x in (a, b, c) if x > 0 or x < -1)",
    "a generator with two conditions": "return list(x for x in (a, b, c) if x > 0 if x != b)",
    "a generator that is asked once": "g = (seen(log, x) for x in (a, b))\n"
    "return next(g), list(log), sum(g, c)",
    "nested comprehensions": "return [[x + y for x in (a, b)] for y in (b, c)]",
    "two loops in one": "return [x * y for x in (a, b) for y in (b, c)]",
    "pairs": "return [x - y for x, y in [(a, b), (b, c)]]",
    "sets and dicts": "return {x for x in (a, b)}, {x: x > 0 for x in (a, c)}",
    "sums": "return sum([a, b], c), sum((a > 0, b > 0)), sum(x > 0 for x in (a, b, c)), sum([])",
    "reversed": "return list(reversed([a, b, c])), [x for x in reversed((a, b))]",
    "a walrus in a connective": "return (a > 0 and (m := b) > 0 and m > c), a",
    "a walrus that stays": "if (n := a + 1) and n > 0: log.append(n)\nreturn n",
    "a walrus in a chain": "return a < (m := b) < m + c",
    "a walrus in a comprehension": "values = [(last := b) for _ in range(2)]\nreturn last, values",
    "is with a walrus": "return (m := a) is None, m",
    "loops": "n = 0\nfor i in range(a, b):\n    n += i if i % 2 else c\nreturn n",
    "range downwards": "return list(range(a, b, -1)), 2 in range(a, 5)",
    "while": "n = 0\nwhile n < a and n != c:\n    n += 1\nreturn n",
    "min and max": "return min(a, b, c), max((a, b)), max(x for x in (a, b)), min([c], default=0)",
    "max by a key": "return max(a, b, key=lambda x: -x if x > 0 else x)",
    "int": "return int(a > 0), int('7'), int(), int('11', 2), isinstance(a, int)",
    "types": "return type(a) is int, type(a) == int, type(a > b) is bool, isinstance(a > b, bool)",
    "more types": "return issubclass(bool, int), isinstance(range(2), range), type(log) is list",
    "len": "return len(range(a, b)), len([a, b]), len('abc')",
    "builtins": "return abs(a), divmod(a, 3), any([a > 0, b > 0]), all([a, b]), sum([a, b])",
    "sorted": "return sorted([a, b, c])",
    "an assertion": "assert a > 0 or b > 0, f'{a} and {b}'\nreturn c",
    "an exception": "if a > b: raise ValueError(f'{a} above {b}')\nreturn c",
    "a handler": "try:\n    return a // b\nexcept ZeroDivisionError as e:\n    return str(e)",
    "a handler of all": "try:\n    return [a][b]\nexcept Exception:\n    return c\nfinally:\n"
    "    log.append(a)",
    "a match": "match a:\n    case 0: return b\n    case n if n > 0 and b > 0: return n\nreturn c",
    "subscripts": "d = {a: b}\nd[c] = a\nreturn d[a], [a, b, c][1:], [a, b][-1], list[str]",
    "a default": "d = defaultdict(list)\nd[a].append(b)\nreturn d, a in d, b in d",
    "in-place addition": "x = [a]\ny = x\ny += [b]\nn = a\nn += b\nreturn x, y, n",
    "a nested function": "def g(x, *, k=2):\n    return x > k and x\nreturn g(a), g(b, k=c)",
    "star arguments": "def g(*xs, **ks): return xs, ks\nreturn g(*[a, b], c, k=a, **{'m': b})",
    "a lambda": "return (lambda x: x if x > 0 else -x)(a)",
    "a nested class": "class K:\n    x = 1\n    y = x and 2\nreturn K.y",
    "a nonlocal": "n = a\ndef g():\n    nonlocal n\n    n = b\n    return True\n"
    "return a > 0 and g(), n",
    "a context": "with manager(log) as m:\n    return m and a",
    "an annotated attribute": "o = types.SimpleNamespace()\no.x: int = a\nreturn o.x or b",
    "loop into an attribute": "o = types.SimpleNamespace()\nfor o.x in (a, b): pass\nreturn o.x",
    "deletion": "d = {0: a}\ndel d[0]\nx = b\ndel x\nreturn d",
    "text": "return f'{a:>4}|{b!r}' + str(c)",
}
PRELUDE = """
import contextlib, types
from collections import defaultdict
def seen(log, x):
    log.append(x)
    return x
@contextlib.contextmanager
def manager(log):
    log.append("in")
    yield True
    log.append("out")
"""


def function_of(body: str, *, lifted: bool) -> Callable[..., Any]:
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    source = f"{PRELUDE}\ndef f(log, a, b, c):\n{indented}\n"
    function: Callable[..., Any] = module_of(source, lifted=lifted)["f"]
    return function


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rewritten_functions_do_the_same_on_numbers(name: str) -> None:
    """On numbers a rewritten function returns, raises and does what the original does."""
    original, rewritten = (function_of(FUNCTIONS[name], lifted=lifted) for lifted in (False, True))

    for numbers in itertools.product((-2, 0, 1, 3), repeat=3):
        assert repr(outcome(rewritten, *numbers)) == repr(outcome(original, *numbers))


#: Functions of numbers only, so that terms can be put in.
ON_TERMS = [
    "a > 0 and b > 0 and c > 0",
    "(a > 0 or b > 0) and (not c > 0)",
    "a if b > c else c",
    "(a if b > c else c) + (1 if a > 0 and b > 0 else 0)",
    "a < b < c",
    "a < b < 1 // c",
    "c != 0 and a // c > b",
    "c == 0 or a % c == 0",
    "int(a > 0) + int(b > 0 or c > 0)",
    "min(a, b, c) - max(a, b)",
    "max(x for x in (a, b))",
    "abs(a) + sum([a, b]) + divmod(a, 3)[1] + divmod(5, 3)[0]",
    "any([a > 0, b > 0]) or all([b > 0, c > 0])",
    "sorted([a, b, c])[1]",
    "len(range(a, b)) + len([x for x in range(a, a + 2)])",
    "helper(a, b) and helper(b, c)",
    "a and b and c",
    "a or b",
    "not a",
    "True if a > 0 else False",
    "(a > 0) == (b > 0)",
    "isinstance(a, int) and isinstance(a > 0, bool) and not isinstance(a, bool) and a > b",
    "type(a) is int and type(a > 0) is bool and b > 0",
    "a in [b, c]",
    "(a > 0) + (b > 0)",
    "math.floor(a) + math.ceil(b) + round(c)",
]
TERMS_PRELUDE = """
import math
def helper(x, y):
    if x > y:
        return x - y > 1
    return x == y
"""


@pytest.mark.parametrize("expression", ON_TERMS)
def test_terms_give_what_numbers_give(expression: str) -> None:
    """A result in terms has the right value for every input that takes the same path."""
    source = f"{TERMS_PRELUDE}\ndef f(log, a, b, c):\n    return {expression}\n"
    original, rewritten = (module_of(source, lifted=lifted)["f"] for lifted in (False, True))
    box = [dict(zip("abc", v, strict=True)) for v in itertools.product(range(-2, 3), repeat=3)]
    left = box
    while left:
        path = Path(left[0], ())
        with following(path):
            try:
                merged = rewritten([], A, B, C)
            except ZeroDivisionError:
                merged = ZeroDivisionError
        condition = term.conjunction(path.literals)
        here = [values for values in box if value_of(condition, values)]
        assert left[0] in here
        for values in here:
            expected = outcome(original, *values.values())[0]
            found = merged if merged is ZeroDivisionError else value_of(merged, values)
            assert found == expected
            assert isinstance(found, bool) == isinstance(expected, bool)
        left = [values for values in left if values not in here]


@pytest.mark.parametrize(
    ("expression", "literals"),
    [
        ("a > 0 and b > 0", 0),
        ("a > 0 or b > 0 or c > 0", 0),
        ("a if b > 0 else c", 0),
        ("a < b < c", 0),
        ("min(a, max(b, c))", 0),
        ("int(a > 0) + int(not b > 0)", 0),
        ("a > 0 and log.append(1) is None", 1),
    ],
)
def test_what_changes_nothing_is_merged(expression: str, literals: int) -> None:
    """Connectives without effects become one formula; an effect forces a decision."""
    function = module_of(f"def f(log, a, b, c):\n    return {expression}\n", lifted=True)["f"]
    path = Path({"a": 1, "b": 1, "c": 1}, ())
    with following(path):
        found = function([], A, B, C)

    assert len(path.literals) == literals
    assert isinstance(found, Int | Bool) or literals


#: Operands of `a > 0 and ...` that change something, each in a way of its own.
EFFECTS = {
    "a method": "state.items.append(1) is None",
    "a store to an attribute": "store(state)",
    "an annotated store": "annotated(state)",
    "a store in a loop": "in_loop(state)",
    "a store to a subscript": "subscript(state)",
    "an in-place addition": "in_place(state)",
    "an in-place addition to a name": "in_place_name(state)",
    "a deletion": "delete(state)",
    "a look-up that adds": "state.table[5] == []",
    "a global": "change_global()",
    "a context manager": "enter(state)",
    "a lambda of the module": "LAMBDA(state)",
    "a property": "state.changing",
    "drawing a block": "state.pool.get_new_blocks(1) is not None",
    "a class": "Counted(state).yes",
    "a comprehension": "[x for x in map(state.items.append, [1])] == [None]",
    "another function": "setattr(state, 'x', 1) is None",
}
EFFECTS_SOURCE = """
COUNT = 0
def store(s):
    s.x = 1
    return True
def annotated(s):
    s.x: int = 1
    return True
def in_loop(s):
    for s.x in (1,):
        pass
    return True
def subscript(s):
    s.items[0] = 1
    return True
def in_place(s):
    s.x += 1
    return True
def in_place_name(s):
    items = s.items
    items += [1]
    return True
def delete(s):
    del s.items[0]
    return True
def change_global():
    global COUNT
    COUNT = 1
    return True
def enter(s):
    with s.context:
        return True
LAMBDA = lambda s: s.items.append(1) is None
class State:
    @property
    def changing(self):
        self.x = 1
        return True
class Counted:
    def __init__(self, s):
        s.x = 1
        self.yes = True
def f(state, a):
    return a > 0 and %s
"""


class Watched:
    """A context manager that notes that it was entered."""

    def __init__(self) -> None:
        self.entered = 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *args: object) -> None: ...


@pytest.mark.parametrize("name", EFFECTS)
def test_an_operand_that_changes_something_runs_only_where_python_runs_it(name: str) -> None:
    """Looking at an operand that Python would not reach leaves no trace; reaching it does."""
    for value, expected in ((0, False), (1, True)):
        module = module_of(EFFECTS_SOURCE % EFFECTS[name], lifted=True)
        state = module["State"]()
        state.x, state.items, state.table = 0, [0], defaultdict(list)
        state.context, state.pool = Watched(), Pool(1)

        def seen(state: Any = state, module: dict[str, Any] = module) -> tuple[Any, ...]:
            pool, context = state.pool.drawn, state.context.entered
            return state.x, len(state.items), state.items[:1], len(state.table), pool, context

        before = *seen(), module["COUNT"]
        with following(Path({"a": value}, ())):
            found = module["f"](state, A)
            assert bool(found) is expected

        assert (before != (*seen(), module["COUNT"])) is expected


def test_super_stays_in_its_method() -> None:
    """`super()` finds its class from its own function, so it is left where it stands."""
    source = """
class Base:
    def f(self, x): return x + 1
    @property
    def p(self): return 5
class Derived(Base):
    def f(self, x): return super().f(x) if x > 0 else super().f(0)
    def g(self, x): return x > 0 and super().f(x) > 1
    def h(self): return super().p, self.__class__ is __class__
"""
    for lifted in (False, True):
        derived = module_of(source, lifted=lifted)["Derived"]()
        assert [derived.f(3), derived.f(-3), derived.g(3), derived.g(0)] == [4, 1, True, False]
        assert derived.h() == (5, True)


def test_line_numbers_are_kept() -> None:
    """An exception in rewritten code points at the line that raised it."""
    source = "def f(a):\n    x = 1\n    return (a > 0 and\n            1 //\n            (a - 1))\n"
    places = []
    for lifted in (False, True):
        try:
            module_of(source, lifted=lifted)["f"](1)
        except ZeroDivisionError as error:
            frames = traceback.extract_tb(error.__traceback__)
            places.append([f.lineno for f in frames if f.filename.endswith(("al.py", "st.py"))][-1])

    assert places == [4, 4]


def test_no_handler_catches_what_the_lifter_raises() -> None:
    """A tree's own `except` cannot turn a construct that is not understood into a guess."""
    for handler in ("except Exception", "except BaseException", "except", "except TypeError"):
        source = f"def f(a):\n    try:\n        return hash(a)\n    {handler}:\n        return 0\n"
        function = module_of(source, lifted=True)["f"]
        with following(Path({"a": 1}, ())), pytest.raises(Unsupported):
            function(A)


def test_a_look_through_a_handler_needs_a_decision() -> None:
    """A handler does not catch that a look at both sides is refused a decision."""
    source = "def g(b):\n    try:\n        if b > 0: return True\n    except:\n        pass\n" + (
        "    return False\ndef f(a, b):\n    return a > 0 and g(b)\n"
    )
    function = module_of(source, lifted=True)["f"]
    path = Path({"a": 1, "b": 1}, ())
    with following(path):
        assert function(A, B) is True

    assert path.literals == [A > 0, B > 0]
    assert not issubclass(NeedsDecision, Exception)


def test_one_block_fills_a_row_only_if_it_is_the_same_block() -> None:
    """`[x for _ in range(n)]` is one block n times only where evaluating x n times is no different.

    The other case, a fresh block for each column, runs round by round.
    """
    source = "def f(pool, n, null):\n    return [null for _ in range(n)]\n" + (
        "def g(pool, n, null):\n    return [pool.get_new_blocks(1)[0] for _ in range(n)]\n"
    )
    module = module_of(source, lifted=True)
    pool = Pool(1)
    path = Path({"a": 3}, (A >= 0,))
    with following(path):
        row = module["f"](pool, A, pool.null_block)
        assert isinstance(row, Table)
        assert path.literals == []
        fresh = module["g"](pool, A, pool.null_block)

    assert (len(fresh), pool.drawn) == (3, 3)
    assert len({block.block_id for block in fresh}) == 3
    assert all(isinstance(block, Block) for block in fresh)


@pytest.mark.parametrize(
    "expression",
    [
        "globals()",
        "locals()",
        "vars()",
        "dir()",
        "eval('1')",
        "id(a)",
        "a is 1",
        "1 is a",
        "a is b",
        "(a > 0) is True",
        "a < (m := b) is not c",
        "a in range(b)",
        "str(a) == '1'",
        "f'{a}' == '1'",
        "'%s' % a",
        "'{}'.format(a)",
        "repr(a)",
        "'%d' % a",
        "isinstance(pool, int)",
        "type(pool.null_block)",
        "pool.null_block.prev_free_block",
        "TABLE[0].ref_cnt",
        "sum(block.ref_cnt for block in TABLE)",
        "sum(block.is_null for block in TABLE)",
        "setattr(pool.null_block, 'ref_cnt', 1)",
    ],
)
def test_what_cannot_be_lifted_is_refused_when_it_runs(expression: str) -> None:
    """Identity, text and the frame of a caller mean nothing for terms, so they are Unsupported."""
    module = module_of(f"def f(pool, a, b, c):\n    return {expression}\n", lifted=True)
    module["TABLE"] = Table(A, lambda column: Block(column, True))
    with following(Path({"a": 10**9, "b": 1}, ())), pytest.raises(Unsupported):
        module["f"](Pool(1), A, B, C)


#: Sums over null blocks and a last one; column i of the table in Python's own list is the same.
SUMS = [
    "sum(block.ref_cnt == 0 and not block.is_null for block in table)",
    "sum(block.ref_cnt for block in table)",
    "sum(block.is_null for block in table) + sum(1 for _ in table)",
    "sum([block.is_null for block in table[a:]])",
    "sum((2 if block.is_null else b for block in table), a)",
    "sum(not block.is_null for block in table if not block.is_null)",
    "max(block.ref_cnt for block in table)",
    "len([block for block in table])",
    "sum(block.ref_cnt for block in reversed(table))",
]


@pytest.mark.parametrize("expression", SUMS)
def test_a_sum_over_a_table_is_that_over_a_list(expression: str) -> None:
    """What is added up run by run, or column by column, is what Python adds up."""
    function = module_of(f"def f(table, a, b):\n    return {expression}\n", lifted=True)["f"]
    original = module_of(f"def f(table, a, b):\n    return {expression}\n", lifted=False)["f"]
    for length, references in itertools.product(range(4), range(3)):
        values = {"a": length, "b": references}
        null, last = (Block(i, False, refs) for i, refs in ((0, 0), (8, references)))
        with following(Path(values, (A >= 0, B >= 0))):
            null_term, last_term = (Block(i, False, refs) for i, refs in ((0, 0), (8, B)))
            table = Table.of_runs((A, null_term), (1, last_term))
            found = value_of(function(table, A, B), values)

        assert found == original([null] * length + [last], length, references)


def test_a_sum_over_runs_decides_nothing() -> None:
    """However long a table of known runs is, adding it up is one term."""
    path = Path({"a": 10**9, "b": 1}, (A >= 0,))
    source = "def f(table):\n    return sum(block.ref_cnt == 0 for block in table)\n"
    function = module_of(source, lifted=True)["f"]
    with following(path):
        table = Table.of_runs((A, Pool(1).null_block), (1, Block(8, False, B)))
        total = function(table)

    assert path.literals == []
    assert value_of(total, {"a": 10**9, "b": 0}) == 10**9 + 1


def test_messages_may_name_terms() -> None:
    """Assertions, exceptions and logging show terms, since no answer depends on their text."""
    source = """
def f(a):
    logger.debug(f"computing {a}")
    assert a > 0, f"{a} is not positive"
    raise ValueError("%s is odd" % a)
"""
    module = module_of(source, lifted=True)
    module["logger"] = types.SimpleNamespace(debug=lambda text: None)
    for value, message in ((1, "a is odd"), (0, "a is not positive")):
        with following(Path({"a": value}, ())), pytest.raises(Exception, match=message):
            module["f"](A)
