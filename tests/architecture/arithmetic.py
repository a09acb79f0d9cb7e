"""What a syntax tree does to vectors of a model's length: the arithmetic, and the births, that are not a kernel's.

A vector is known by its name, by the type ``F32`` or by the function that it came from, and so is what a local name is
given of one. A name that its module declares a number is none.
"""

import ast

import numpy as np

NAMES = {
    *("x", "x0", "x_out", "x_prev", "y", "v", "acc", "base", "momentum", "moments", "offset", "shared", "staged"),
    *("direction", "past", "mean_h", "total", "wide"),
}
"""Local names of vectors."""
ATTRIBUTES = {
    *("x", "x_prev", "momentum", "total", "moments", "A", "B", "buffers", "offset", "models", "directions"),
    *("_value", "_spare", "_changes", "_spare_changes", "spare_v", "spare_total", "_buffer_v"),
    *("_shared", "_sum", "_spare_sum"),
}
"""Names of vectors, or of what holds them, behind a dot."""
READERS = {"store", "rows", "saved"}
"""What has a method ``read`` that returns a vector."""
SOURCES = {
    *("take", "spare", "row", "decoded", "correction", "flatten", "combine", "in_float32", "gradient"),
    *("weighted_sum", "copied", "shared_offset", "direction_of", "to_host", "view_of"),
}
"""Functions and methods that return vectors."""
BORN = {"empty", "zeros", "full"}
"""Functions of ``fedcore.memory`` that do."""
LENGTHS = {"n", "n_parameters", "p"}
"""Names of a model's length."""
SCALARS = {"int", "float", "bool", "str"}
BIRTHS = {"zeros", "empty", "full", "ones", "zeros_like", "empty_like", "full_like", "ones_like"}
SAME = {"copy", "astype", "view", "reshape", "ravel"}
"""Methods that return the vector they are called on, or one like it."""
READ = {"sum", "mean", "dot", "min", "max", "prod", "std", "any", "all", "clip", "round", "argmax", "cumsum"}
"""Methods that compute over a vector."""
MORE = {
    *("sum", "mean", "dot", "vdot", "einsum", "where", "clip", "average", "any", "all"),
    *("array", "concatenate", "stack"),
}
"""Functions of NumPy that do so and are no ufuncs."""
IDENTITY = (ast.Is, ast.IsNot, ast.In, ast.NotIn)


def found_in(source):
    """The lines of a module that calculate with vectors or make them: function, line, what it does."""
    tree = ast.parse(source)
    scalars = _scalars(tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    within = {id(inner) for f in functions for node in f.body for inner in ast.walk(node)}
    loose = [node for node in ast.walk(tree) if id(node) not in within]
    for function in functions:
        nodes = [node for statement in function.body for node in ast.walk(statement)]
        yield from _Scope(function.name, scalars).look(nodes, function)
    yield from _Scope("the module", scalars).look(loose, None)


def _scalars(tree):
    """Names that are declared as numbers, wherever in a module; or as something that is no array."""
    declared = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            declared.setdefault(node.arg, []).append(node.annotation)
        elif isinstance(node, ast.AnnAssign):
            name = node.target.id if isinstance(node.target, ast.Name) else getattr(node.target, "attr", None)
            declared.setdefault(name, []).append(node.annotation)
    return {name for name, notes in declared.items() if all(_words(note) & SCALARS for note in notes)}


def _words(annotation):
    named = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    return named | {node.attr for node in ast.walk(annotation) if isinstance(node, ast.Attribute)}


class _Scope:
    """One function: which of its names are vectors."""

    def __init__(self, name, scalars):
        self.name, self.scalars, self.local = name, scalars, set()

    def look(self, nodes, function):
        if function is not None:
            every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            self.local |= {a.arg for a in every if a.annotation is not None and "F32" in _words(a.annotation)}
        before = None
        while before != self.local:  # a name may be given what another was given further down
            before = set(self.local)
            for node in nodes:
                self._learn(node)
        for node in nodes:
            what = self._what(node)
            if what is not None:
                yield self.name, node.lineno, what

    def _learn(self, node):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if "F32" in _words(node.annotation) or (node.value is not None and self.is_vector(node.value)):
                self.local.add(node.target.id)
        elif isinstance(node, ast.NamedExpr) and self.is_vector(node.value):
            self.local.add(node.target.id)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=False)
                self.local |= {t.id for t, value in pairs if isinstance(t, ast.Name) and self.is_vector(value)}
        elif isinstance(node, ast.For | ast.comprehension) and self.is_vector(node.iter):
            self.local |= {node.target.id} if isinstance(node.target, ast.Name) else set()

    def is_vector(self, node):
        """Whether an expression is a vector, part of one, or a list of some."""
        match node:
            case ast.Name(id=name):
                return name in self.local or (name in NAMES and name not in self.scalars)
            case ast.Attribute(value=ast.Attribute(attr="v" | "T")):
                return False  # a coefficient of a step's linear form
            case ast.Attribute(attr=name):
                return name in ATTRIBUTES and name not in self.scalars
            case ast.Subscript(value=value) | ast.Starred(value=value):
                return self.is_vector(value)
            case ast.UnaryOp(operand=value):
                return not isinstance(node.op, ast.Not) and self.is_vector(value)
            case ast.BinOp(left=left, right=right):
                return self.is_vector(left) or self.is_vector(right)
            case ast.IfExp(body=one, orelse=other):
                return self.is_vector(one) or self.is_vector(other)
            case ast.List(elts=parts):
                return any(self.is_vector(part) for part in parts)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="np"), attr="asarray"), args=[value, *_]):
                return self.is_vector(value)
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in SAME and self.is_vector(value):
                return True
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                if isinstance(node.func, ast.Attribute) and _last_name(node.func.value) == "np":
                    return self._is_birth(node)
                if name == "read" and isinstance(node.func, ast.Attribute):
                    return _last_name(node.func.value) in READERS
                return name in SOURCES or name in BORN
        return False

    def _is_birth(self, call):
        """Whether it is np.zeros(n) or np.zeros_like(x), say."""
        like = any(self.is_vector(argument) or _is_length(argument) for argument in call.args[:1])
        return call.func.attr in BIRTHS and like

    def _what(self, node):
        """What an expression does that a kernel is due to do, or None."""
        match node:
            case ast.BinOp(left=left, right=right) if not isinstance(left, ast.List | ast.Tuple):
                if self.is_vector(left) or self.is_vector(right):
                    return f"{type(node.op).__name__} of a vector"
            case ast.AugAssign(target=target, value=value):
                if self.is_vector(target) or self.is_vector(value):
                    return f"{type(node.op).__name__} into a vector"
            case ast.UnaryOp(operand=value) if not isinstance(node.op, ast.Not):
                if self.is_vector(value):
                    return f"{type(node.op).__name__} of a vector"
            case ast.Compare(left=left, comparators=[right], ops=[op]) if not isinstance(op, IDENTITY):
                if self.is_vector(left) or self.is_vector(right):
                    return "comparison of a vector"
            case ast.Call():
                return self._what_call(node)
        return None

    def _what_call(self, node):
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        match node.func:
            case ast.Attribute(value=ast.Name(id="np"), attr=name):
                if self._is_birth(node):
                    return f"np.{name} of a model's length"
                vector = any(self.is_vector(argument) for argument in arguments)
                if vector and (name in MORE or isinstance(getattr(np, name, None), np.ufunc)):
                    return f"np.{name} of a vector"
            case ast.Attribute(value=value, attr=name) if self.is_vector(value):
                if name in READ or name in ("copy", "astype"):
                    return f".{name}() of a vector"
        return None


def _last_name(node):
    return getattr(node, "attr", getattr(node, "id", ""))


def _is_length(node):
    """Whether a length mentions a model's: n, layout.n_parameters, n - p, len(x)."""
    named = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    behind = {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    return bool((named | behind) & LENGTHS)
