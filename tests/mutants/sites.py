"""The mutants of a source: small changes that should each make a test fail.

A mutant is an edit of the text, so that all else, line numbers included, stays as it is. Left out are annotations,
docstrings, imports, ``__all__``, names of types, what is asserted (``strict=True``), and wording: strings with a space,
and everything within a ``raise``, which as a whole is a mutant.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
OPERATIONS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "/",
    ast.Mod: "//",
    ast.Pow: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.BitXor: "|",
    ast.LShift: ">>",
    ast.RShift: "<<",
}
TWINS = {"min": "max", "minimum": "maximum", "any": "all", "floor": "ceil", "zeros": "ones", "argmin": "argmax"}
TWINS |= {other: one for one, other in TWINS.items()}
ASSERTIONS = ("strict", "assume_unique")
"""Arguments that say what is so, and change nothing where it is."""
SKIPPED = (ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Global, ast.Nonlocal)


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        file: the source's path from the repository's root.
        where: the qualified name of the outermost function, or "" where the change is made when the module is imported.
        first_line: that function's, its decorators counted.
        line: that of the change.
        was: the line as it was, without its indentation.
        change: "old -> new".
        begin, end, text: the edit, in bytes of the source.
    """

    file: str
    where: str
    first_line: int
    line: int
    was: str
    change: str
    begin: int
    end: int
    text: str

    @property
    def name(self) -> str:
        """Its name, which depends on its line's text and not on the line's number."""
        return f"{self.file} | {self.was} | {self.change}"

    def compiles(self, source: str) -> bool:
        """Whether the changed source is valid Python."""
        try:
            compile(self.applied(source), self.file, "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return False
        return True

    def applied(self, source: str) -> str:
        """The changed source."""
        data = source.encode()
        return (data[: self.begin] + self.text.encode() + data[self.end :]).decode()


def mutants(file: str, source: str) -> list[Mutant]:
    """All mutants of a source, in order; of two equal ones on one line the second's change ends in " (2)"."""
    return list(_Source(file, source).all())


class _Source:
    def __init__(self, file: str, source: str) -> None:
        self.file, self.data = file, source.encode()
        self.lines = self.data.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.tree = ast.parse(source)

    def all(self) -> Iterator[Mutant]:
        seen: dict[str, int] = {}
        found = [
            (begin, end, text, where, first) for begin, end, text, where, first in self._of_body(self.tree, "", 0, "")
        ]
        for begin, end, text, where, first in sorted(found, key=lambda each: each[:3]):
            line = next(at for at, start in enumerate(self.starts) if start > begin)
            was = self.lines[line - 1].decode().strip()
            old = " ".join(self.data[begin:end].decode().split())
            change = f"{old} -> {text}"
            key = f"{was} | {change}"
            seen[key] = seen.get(key, 0) + 1
            change += f" ({seen[key]})" * (seen[key] > 1)
            yield Mutant(self.file, where, first, line, was, change, begin, end, text)

    def _of_body(self, node, where, first, scope):
        """Visit statements, at import or in a function's body."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{scope}.{child.name}" if scope else child.name
                own = (
                    (where, first) if where else (name, min([child.lineno, *(d.lineno for d in child.decorator_list)]))
                )
                for decorator in child.decorator_list:
                    if isinstance(decorator, ast.Name) and decorator.id == "ieee":
                        begin, end = self._span(decorator)
                        yield begin - 1, end, "", where, first
                for default in (*child.args.defaults, *child.args.kw_defaults):
                    if default is not None:
                        yield from self._of_expression(default, where, first)
                yield from self._of_statements(child.body, *own, f"{name}.<locals>")
            elif isinstance(child, ast.ClassDef):
                name = f"{scope}.{child.name}" if scope else child.name
                for decorator in child.decorator_list:
                    yield from self._of_expression(decorator, where, first)
                yield from self._of_statements(child.body, where, first, name)
            elif isinstance(child, ast.stmt):
                yield from self._of_statements([child], where, first, scope)

    def _of_statements(self, body, where, first, scope):
        for statement in body:
            if isinstance(statement, SKIPPED) or _is_text(statement) or _is_typing(statement):
                continue
            yield from ((*each, where, first) for each in self._of_statement(statement, bool(where)))
            if isinstance(statement, ast.Raise):
                continue
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from self._of_body(ast.Module([statement], []), where, first, scope)
                continue
            if isinstance(statement, ast.If | ast.While):
                yield from ((*each, where, first) for each in self._negated(statement.test))
            for _, value in ast.iter_fields(statement):
                for each in value if isinstance(value, list) else [value]:
                    if isinstance(each, ast.stmt):
                        yield from self._of_statements([each], where, first, scope)
                    elif isinstance(each, ast.ExceptHandler):
                        yield from self._of_statements(each.body, where, first, scope)
                    elif isinstance(each, ast.withitem):
                        yield from self._of_expression(each.context_expr, where, first)
                    elif isinstance(each, ast.expr) and each is not getattr(statement, "annotation", None):
                        yield from self._of_expression(each, where, first)

    def _of_statement(self, statement, in_function):
        span = self._span(statement)
        if isinstance(statement, ast.Raise):
            yield *span, "pass"
        elif isinstance(statement, ast.Return) and not _is_none(statement.value):
            yield *self._span(statement.value), "None"
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield *span, "pass"
        elif isinstance(statement, ast.AugAssign):
            yield *span, "pass"
            yield from self._between(statement.target, statement.value, statement.op, OPERATIONS, "=")
        elif isinstance(statement, ast.Assign) and in_function:
            if all(isinstance(target, ast.Attribute | ast.Subscript) for target in statement.targets):
                yield *span, "pass"
        elif isinstance(statement, ast.Delete | ast.Break | ast.Continue):
            yield *span, "pass"

    def _of_expression(self, root, where, first):
        yield from ((*each, where, first) for each in self._expressions(root))

    def _expressions(self, node):
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
            return
        span = self._span(node) if hasattr(node, "end_col_offset") else None
        if isinstance(node, ast.Compare):
            for left, op, right in zip([node.left, *node.comparators[:-1]], node.ops, node.comparators, strict=True):
                yield from self._between(left, right, op, COMPARISONS, "")
        elif isinstance(node, ast.BinOp):
            yield from self._between(node.left, node.right, node.op, OPERATIONS, "")
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                word = {ast.And: "or", ast.Or: "and"}[type(node.op)]
                yield from self._between(left, right, node.op, {type(node.op): word}, "")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            yield span[0], self._span(node.operand)[0], ""
        elif isinstance(node, ast.IfExp):
            yield from self._negated(node.test)
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield from self._negated(test)
        elif isinstance(node, ast.Constant):
            yield from self._of_constant(node, span)
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg not in (None, *ASSERTIONS):
                    yield self._argument(node, keyword)
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in TWINS:
                end = self._span(node.func)[1]
                yield end - len(name), end, TWINS[name]
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.keyword) and child.arg in ASSERTIONS:
                continue
            if isinstance(child, ast.expr | ast.comprehension | ast.keyword | ast.Slice):
                yield from self._expressions(child)

    def _of_constant(self, node, span):
        value = node.value
        if isinstance(value, bool):
            yield *span, str(not value)
        elif isinstance(value, int | float):
            yield *span, repr(value + 1) if value != float("inf") else "1.0"
        elif isinstance(value, str) and " " not in value and self.data[span[0] : span[0] + 1] in (b'"', b"'"):
            yield *span, repr(f"x{value}")

    def _negated(self, test):
        if not isinstance(test, ast.Compare | ast.UnaryOp | ast.BoolOp | ast.Constant):
            begin, end = self._span(test)
            yield begin, end, f"not ({self.data[begin:end].decode()})"

    def _argument(self, call, keyword):
        """The edit that removes a keyword argument and its comma."""
        begin, end = self._span(keyword)
        rest = self.data[end : self._span(call)[1]]
        return begin, end + (rest.index(b",") + 1 if rest.lstrip().startswith(b",") else 0), ""

    def _between(self, left, right, op, table, suffix):
        """The edit of the operator between two expressions."""
        if type(op) not in table:
            return
        begin, end = self._span(left)[1], self._span(right)[0]
        text = self.data[begin:end].decode()
        old = _WRITTEN[type(op)] + suffix
        at = text.find(old)
        if at >= 0 and "#" not in text:
            at = begin + len(text[:at].encode())
            yield at, at + len(old), table[type(op)] + suffix

    def _span(self, node):
        begin = self.starts[node.lineno - 1] + node.col_offset
        return begin, self.starts[node.end_lineno - 1] + node.end_col_offset


_WRITTEN = {
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="},
    **{ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.And: "and", ast.Or: "or"},
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"},
    **{ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>"},
}


def _is_text(statement):
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_none(value):
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _is_typing(statement):
    """Whether a statement only defines types or a module's exports."""
    if isinstance(statement, ast.AnnAssign):
        if isinstance(statement.annotation, ast.Name) and statement.annotation.id == "TypeAlias":
            return True
        return statement.value is None
    if isinstance(statement, ast.If):
        return isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        made = statement.value.func if isinstance(statement.value, ast.Call) else None
        return statement.targets[0].id == "__all__" or getattr(made, "id", "") in ("TypeVar", "ParamSpec")
    return False
