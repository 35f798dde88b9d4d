"""The few constructs of Python that never ask an object: rewritten to ask.

``and``, ``or``, ``not``, ``is``, conditional expressions, chained comparisons and lists built by
``[x for _ in range(..)]`` become calls of the helpers in `models.runtime`; calls and stores announce
themselves, so that looking at both sides of a connective can never change anything. Everything else
of vLLM's source runs as it stands. Line numbers are kept.
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
#: Names that the rewritten source calls; `models.runtime.HELPERS` defines them.
AND, OR, NOT, CHOOSE, COMPARE, FILL, CALL, EFFECT = (
    "__capproof_and__",
    "__capproof_or__",
    "__capproof_not__",
    "__capproof_choose__",
    "__capproof_compare__",
    "__capproof_fill__",
    "__capproof_call__",
    "__capproof_effect__",
)


class _Rewriter(ast.NodeTransformer):
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
        self.generic_visit(node)
        if len(node.ops) == 1 and not isinstance(node.ops[0], ast.Is | ast.IsNot):
            return node
        rest: list[ast.expr] = []
        for operator, operand in zip(node.ops, node.comparators, strict=True):
            rest += [ast.Constant(_COMPARISONS[type(operator)]), _later(operand)]
        return _helper_call(node, COMPARE, node.left, *rest)

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        self.generic_visit(node)
        generator = node.generators[0]
        target = generator.target
        if len(node.generators) > 1 or generator.ifs or not isinstance(target, ast.Name):
            return node
        used = {inner.id for inner in ast.walk(node.elt) if isinstance(inner, ast.Name)}
        if target.id in used:
            return node
        return _helper_call(node, FILL, _later(node.elt), generator.iter)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return node
        call = ast.Call(ast.Name(CALL, ast.Load()), [node.func, *node.args], node.keywords)
        return ast.copy_location(call, node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        return _announced(node, node.targets)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        return _announced(node, [node.target])

    def visit_Delete(self, node: ast.Delete) -> Any:
        self.generic_visit(node)
        return _announced(node, node.targets)


class _Functions(ast.NodeTransformer):
    """Rewrites function bodies only: class and module bodies run once, on ordinary values."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        rewriter = _Rewriter()
        body: list[ast.stmt] = []
        for statement in node.body:
            rewritten = rewriter.visit(statement)
            body += rewritten if isinstance(rewritten, list) else [rewritten]
        node.body = body
        return node


def rewrite(module: ast.Module) -> ast.Module:
    """Return the module with its functions ready to run on terms."""
    _Functions().visit(module)
    return module


def _needs_own_scope(node: ast.AST) -> bool:
    """Whether an operand would mean something else inside a lambda."""
    return any(
        isinstance(inner, ast.NamedExpr | ast.Yield | ast.Await)
        or (isinstance(inner, ast.Name) and inner.id == "super")
        for inner in ast.walk(node)
    )


def _later(expression: ast.expr) -> ast.Lambda:
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.copy_location(ast.Lambda(nothing, expression), expression)


def _helper_call(node: ast.AST, helper: str, *args: ast.expr) -> ast.Call:
    return ast.copy_location(ast.Call(ast.Name(helper, ast.Load()), list(args), []), node)


def _announced(statement: ast.stmt, targets: list[ast.expr]) -> Any:
    stores = (ast.Attribute, ast.Subscript)
    if not any(isinstance(inner, stores) for target in targets for inner in ast.walk(target)):
        return statement
    announcement = ast.Expr(_helper_call(statement, EFFECT))
    return [ast.copy_location(announcement, statement), statement]
