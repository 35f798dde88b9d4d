"""The few constructs of Python that never ask an object: rewritten to ask.

``and``, ``or``, ``not``, ``is``, conditional expressions, chained comparisons and comprehensions
over one name become calls of the helpers in `models.runtime`; calls, stores and
look-ups announce themselves, so that looking at both sides of a connective can change nothing.
Messages are marked, since only they may turn a term into text, and no handler catches what the
lifter raises. Everything else of vLLM's source runs as it stands. Line numbers are kept.
"""

from __future__ import annotations

import ast
from typing import Any

_COMPARISONS = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}
#: Names that the rewritten source calls; `models.runtime.BUILTINS` defines them.
AND, OR, NOT, CHOOSE, COMPARE, IDENTITY = (
    "__capproof_and__",
    "__capproof_or__",
    "__capproof_not__",
    "__capproof_choose__",
    "__capproof_compare__",
    "__capproof_identity__",
)
FILL, EACH, SWEEP, CALL, ITEM, EFFECT, MESSAGE, OURS, REFUSE, DROP = (
    "__capproof_fill__",
    "__capproof_each__",
    "__capproof_sweep__",
    "__capproof_call__",
    "__capproof_item__",
    "__capproof_effect__",
    "__capproof_message__",
    "__capproof_ours__",
    "__capproof_refuse__",
    "__capproof_drop__",
)
_STORES = (ast.Attribute, ast.Subscript)
_IDENTITIES = (ast.Is, ast.IsNot)


class _Rewriter(ast.NodeTransformer):
    """Rewrites the body of one function.

    Args:
        function: The function as it stands, None for a lambda.
    """

    def __init__(self, function: ast.FunctionDef | None = None) -> None:
        self._function = function

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        if _needs_own_scope(node):
            return self.generic_visit(node)
        helper = AND if isinstance(node.op, ast.And) else OR
        operands = [_later(self.visit(value)) for value in node.values]
        return _helper_call(node, helper, *operands)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return _helper_call(node, NOT, node.operand) if isinstance(node.op, ast.Not) else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if _needs_own_scope(node):
            return self.generic_visit(node)
        self.generic_visit(node)
        return _helper_call(node, CHOOSE, node.test, _later(node.body), _later(node.orelse))

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        needs_own_scope = _needs_own_scope(node)
        self.generic_visit(node)
        if len(node.ops) == 1:
            if not isinstance(node.ops[0], _IDENTITIES):
                return node
            same = _helper_call(node, IDENTITY, node.left, node.comparators[0])
            return same if isinstance(node.ops[0], ast.Is) else _helper_call(node, NOT, same)
        if needs_own_scope:
            if any(isinstance(operator, _IDENTITIES) for operator in node.ops):
                what = ast.Constant("a chained comparison with `is` that binds a name")
                return _helper_call(node, REFUSE, what)
            return node
        rest: list[ast.expr] = []
        for operator, operand in zip(node.ops, node.comparators, strict=True):
            rest += [ast.Constant(_COMPARISONS[type(operator)]), _later(operand)]
        return _helper_call(node, COMPARE, node.left, *rest)

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        each = self._each(node)
        if each is None:
            return node
        generator = node.generators[0]
        used = {inner.id for inner in ast.walk(node.elt) if isinstance(inner, ast.Name)}
        if not generator.ifs and generator.target.id not in used:  # type: ignore[attr-defined]
            return _helper_call(node, FILL, _later(node.elt), generator.iter)
        return _helper_call(node, EACH, ast.Constant(True), *each)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        each = self._each(node)
        return node if each is None else _helper_call(node, EACH, ast.Constant(False), *each)

    def _each(self, node: ast.ListComp | ast.GeneratorExp) -> list[ast.expr] | None:
        """What to loop over, what to make of each, and what each must show; None: as it stands."""
        needs_own_scope = _needs_own_scope(node)
        self.generic_visit(node)
        generator = node.generators[0]
        is_plain = len(node.generators) == 1 and not generator.is_async
        if needs_own_scope or not is_plain or not isinstance(generator.target, ast.Name):
            return None
        of = [_later(part, generator.target.id) for part in (node.elt, *generator.ifs)]
        return [generator.iter, *of]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        is_message = _is_named(getattr(node.func, "value", None), "logger")
        needs_own_scope = _needs_own_scope(node)
        self.generic_visit(node)
        if _is_named(node.func, "super"):
            return node
        call = _helper_call(node, CALL, node.func, *node.args)
        call.keywords = node.keywords
        return _message(call) if is_message and not needs_own_scope else call

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        is_slice = any(isinstance(inner, ast.Slice) for inner in ast.walk(node.slice))
        if is_slice or not isinstance(node.ctx, ast.Load):
            return node
        return _helper_call(node, ITEM, node.value, node.slice)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        can_wait = node.msg is not None and not _needs_own_scope(node.msg)
        self.generic_visit(node)
        if can_wait and node.msg is not None:
            node.msg = _message(node.msg)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        can_wait = node.exc is not None and not _needs_own_scope(node.exc)
        self.generic_visit(node)
        if can_wait and node.exc is not None:
            node.exc = _message(node.exc)
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        self.generic_visit(node)
        if node.handlers:
            ours = ast.ExceptHandler(ast.Name(OURS, ast.Load()), None, [ast.Raise()])
            node.handlers.insert(0, ast.copy_location(ours, node.handlers[0]))
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        return _announced(node, node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        self.generic_visit(node)
        return _announced(node, [node.target])

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            # Adding to a list changes it in place; adding to a number does not.
            return _after_effect(node, ast.Name(node.target.id, ast.Load()))
        return _announced(node, [node.target])

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        is_pop = isinstance(call, ast.Call) and getattr(call.func, "attr", None) == "pop"
        self.generic_visit(node)
        rewritten = node.value
        if is_pop and isinstance(rewritten, ast.Call) and not rewritten.keywords:
            method, *args = rewritten.args
            assert isinstance(method, ast.Attribute)
            node.value = _helper_call(node, DROP, method.value, *args)
        return node

    def visit_Delete(self, node: ast.Delete) -> Any:
        self.generic_visit(node)
        return _announced(node, node.targets)

    def visit_For(self, node: ast.For) -> Any:
        sweeps = self._function is not None and _is_sweep(node, self._function)
        self.generic_visit(node)
        if sweeps:
            breaks = any(isinstance(part, ast.Break) for part in ast.walk(node))
            node.iter = _helper_call(node.iter, SWEEP, node.iter, ast.Constant(breaks))
        return _announced(node, [node.target])

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        return _after_effect(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return _Functions().generic_visit(node)

    def visit_Global(self, node: ast.Global) -> Any:
        return _after_effect(node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> Any:
        return _after_effect(node)


class _Functions(ast.NodeTransformer):
    """Rewrites function bodies only: class and module bodies run once, on ordinary values."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        rewriter = _Rewriter(node)
        body: list[ast.stmt] = []
        for statement in node.body:
            rewritten = rewriter.visit(statement)
            body += rewritten if isinstance(rewritten, list) else [rewritten]
        node.body = body
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        node.body = _Rewriter().visit(node.body)
        return node


def rewrite(module: ast.Module) -> ast.Module:
    """Return the module with its functions ready to run on terms."""
    _Functions().visit(module)
    return module


def _needs_own_scope(node: ast.AST) -> bool:
    """Whether a part would mean something else inside a lambda."""
    own = ast.NamedExpr | ast.Yield | ast.YieldFrom | ast.Await
    names = ("super", "__class__", "locals")
    return any(
        isinstance(inner, own) or (isinstance(inner, ast.Name) and inner.id in names)
        for inner in ast.walk(node)
    )


def _is_sweep(loop: ast.For, function: ast.FunctionDef) -> bool:
    """Whether a loop does nothing but look at columns, collect blocks and store into its column.

    What it collects may be asked only whether it is empty, and be handed on: how many rounds there
    are makes no difference then.
    """
    target = loop.target
    if not isinstance(target, ast.Name) or loop.orelse:
        return False
    collected: set[str] = set()
    if not all(_is_part_of_sweep(part, target.id, collected) for part in loop.body):
        return False
    inside = {id(inner) for inner in ast.walk(loop)}
    uses = _uses(function, collected, inside)
    return all(_only_tests_or_hands_on(use, parent) for use, parent in uses)


def _is_part_of_sweep(part: ast.stmt, target: str, collected: set[str]) -> bool:
    if isinstance(part, ast.If):
        return all(_is_part_of_sweep(p, target, collected) for p in (*part.body, *part.orelse))
    if isinstance(part, ast.Assign):
        place = part.targets[0]
        return (
            len(part.targets) == 1
            and isinstance(place, ast.Subscript)
            and _is_named(place.slice, target)
            and isinstance(place.value, ast.Name)
        )
    if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call):
        method = part.value.func
        if isinstance(method, ast.Attribute) and isinstance(method.value, ast.Name):
            collected.add(method.value.id)
            return method.attr == "append"
    return isinstance(part, ast.Continue | ast.Break)


def _uses(
    function: ast.FunctionDef, names: set[str], inside: set[int]
) -> list[tuple[ast.Name, ast.AST]]:
    """Where a function reads names outside a loop, each with what it is a part of."""
    return [
        (child, parent)
        for parent in ast.walk(function)
        if id(parent) not in inside
        for child in ast.iter_child_nodes(parent)
        if isinstance(child, ast.Name) and child.id in names and isinstance(child.ctx, ast.Load)
    ]


def _only_tests_or_hands_on(use: ast.Name, parent: ast.AST) -> bool:
    is_test = isinstance(parent, ast.If) and parent.test is use
    if isinstance(parent, ast.Call):
        return parent.args == [use] and isinstance(parent.func, ast.Attribute)
    return is_test


def _is_named(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _later(expression: ast.expr, *names: str) -> ast.Lambda:
    """The expression as a function of ``names``."""
    args = [ast.copy_location(ast.arg(name), expression) for name in names]
    of = ast.arguments(posonlyargs=[], args=args, kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.copy_location(ast.Lambda(of, expression), expression)


def _helper_call(node: ast.AST, helper: str, *args: ast.expr) -> ast.Call:
    return ast.copy_location(ast.Call(ast.Name(helper, ast.Load()), list(args), []), node)


def _message(expression: ast.expr) -> ast.Call:
    return _helper_call(expression, MESSAGE, _later(expression))


def _announced(statement: ast.stmt, targets: list[ast.expr]) -> Any:
    if any(isinstance(inner, _STORES) for target in targets for inner in ast.walk(target)):
        return _after_effect(statement)
    return statement


def _after_effect(statement: ast.stmt, *on: ast.expr) -> list[ast.stmt]:
    announcement = ast.Expr(_helper_call(statement, EFFECT, *on))
    return [ast.copy_location(announcement, statement), statement]
