"""The words of docstrings and errors, over the syntax trees of the package.

An error says one of four things:

- of an argument: ``argument: expected X, got Y`` (or ``found``, or ``missing``), and then the way out;
- of an argument that something else could not read: ``argument: expected X: {error}``;
- of a state of things (a file, a store, a round): ``thing: what is the matter; the way out``;
- what another error said: a text from below, as it is, with the way out behind it.

A docstring's first sentence begins with a noun or a verb: no pronoun, no relative clause as its subject.
"""

import ast
import re
from pathlib import Path

import pytest

import fedcore
from fedcore import errors

ROOT = Path(fedcore.layout.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
OF_A_STATE = {
    *("CheckpointError", "ClusterError", "ConfigError", "CorruptionError", "DivergedError", "LockedError"),
    *("MissingDataError", "MissingDependencyError", "RoundError", "StoreError"),
}
FORWARDED = re.compile(r"^(\S+: )*<[^<>]+(<.*>)?[^<>]*>([;:] .*| \(.*\))?$", re.S)
READ_BY_ANOTHER = re.compile(r"^[^:]+(: [^:]+)?: expected .+: <[^>]*error[^>]*>\S*$", re.S)
OF_AN_ARGUMENT = re.compile(r"^.+?: expected .+,? (got|found|missing) .+$", re.S)
STATE = re.compile(r"^.+?: .+(; |: |\n).+$", re.S)

PRONOUN = re.compile(
    r"(As|Anybody|Anything|Everybody|Everything|He|How|It|Nobody|Nothing|She|Somebody|Something|That|These|They|This"
    r"|Those|What|Whatever|When|Where|Whether|Which|Who|Whoever|Whom|Whose|Why)\b"
    r"|(All|Any|Both|Each|None|Others|Some) (of|that)\b"
)


def texts(function):
    """The strings that a function gives a name to."""
    found = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, node.value)
    return found


def template(node, named):
    """A message with <what> stands in its holes; names of strings of the same function are put in their place."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else f"<{node.value}>"
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part, named) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return template(node.value, named)
    if isinstance(node, ast.BinOp):
        return template(node.left, named) + template(node.right, named)
    if isinstance(node, ast.Name) and isinstance(named.get(node.id), ast.JoinedStr | ast.Constant):
        return template(named[node.id], {name: text for name, text in named.items() if name != node.id})
    return f"<{ast.unparse(node)}>"


def raised(tree):
    """(line, class, message) of each error of fedcore's that is raised."""
    functions = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]
    inner = {}
    for function in functions:  # the innermost comes last
        for node in ast.walk(function):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                inner[node] = function
    for node, function in inner.items():
        if isinstance(node.exc.func, ast.Name) and node.exc.func.id in ERRORS:
            said = template(node.exc.args[0], texts(function)) if node.exc.args else ""
            yield node.lineno, node.exc.func.id, said


def is_grammatical(kind, said):
    if FORWARDED.match(said) or OF_AN_ARGUMENT.match(said) or READ_BY_ANOTHER.match(said):
        return True
    return kind in OF_A_STATE and bool(STATE.match(said))


@pytest.mark.parametrize(
    ("kind", "said", "right"),
    [
        ("RangeError", "lr: expected a finite number > 0, got 0", True),
        ("RangeError", "lr: expected a finite number > 0", False),
        ("RangeError", "lr must be positive", False),
        ("DtypeError", "x: expected numbers: <error>", True),
        ("StoreError", "<path>: its header was changed; use a copy of the store", True),
        ("StoreError", "its header was changed", False),
        ("ArrayError", "x: its header was changed; use a copy of the store", False),
        ("ConfigError", "<path>: <error>", True),
    ],
)
def test_the_grammar(kind, said, right):
    assert is_grammatical(kind, said) == right


def test_each_error_keeps_the_grammar():
    found = [(file, *one) for file in FILES for one in raised(ast.parse(file.read_text()))]
    assert len(found) > 300
    wrong = [
        f"{file.relative_to(ROOT)}:{line} {kind}: {said}"
        for file, line, kind, said in found
        if not is_grammatical(kind, said)
    ]
    assert wrong == []


def documented(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield getattr(node, "name", "the module"), text


def test_no_docstring_begins_with_a_pronoun_or_a_relative_clause():
    found = [
        f"{file.relative_to(ROOT)}, {name}: {text.splitlines()[0]}"
        for file in FILES
        for name, text in documented(ast.parse(file.read_text()))
        if PRONOUN.match(text)
    ]
    assert found == []


@pytest.mark.parametrize("folder", ["fedcore", "csrc"])
def test_except_is_not_but_for_and_consecutive_not_on_end(folder):
    files = [path for path in sorted((ROOT.parent / folder).rglob("*")) if path.suffix in {".py", ".h", ".cpp", ".inl"}]
    found = [
        f"{file.relative_to(ROOT.parent)}: {' '.join(bad.split())}"
        for file in files
        for bad in re.findall(r"\bbut\s+(?:[#/]+\s+)?for\b|\bon\s+(?:[#/]+\s+)?end\b", file.read_text())
    ]
    assert found == []


RANGE_IN_OWN_WORDS = re.compile(
    r"expected (None or )?an? (finite |whole )?(integer|int|number|count)( in|,? at least|,? at most| >=?| <=?) "
    r"(?!.* or a str)"
)


def spoken(tree):
    """The strings of a module, each with what stands for its holes, except docstrings and parts of one another."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    loose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        whole = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and id(node) not in parts)
        if whole and id(node) not in loose:
            yield template(node, {})


@pytest.mark.parametrize(
    ("source", "own"),
    [
        ('f(f"steps: expected an integer in 1..{most}, got {steps}")', True),
        ('f("expected a whole number, at least 1, got 0")', True),
        ('f("x: expected None or a finite number > 0, got 0")', True),
        ('f(f"steps: expected {due_whole(1)}, got {steps}")', False),
        ('f("client: expected an int in 0..2**64 - 1 or a str, got 1.5")', False),
        ('def f():\n    """One: expected a number in (0, 1], got 2"""', False),
        ('f("x: expected a number or a table, got 2")', False),
    ],
)
def test_a_range_in_own_words_is_found(source, own):
    assert any(RANGE_IN_OWN_WORDS.search(text) for text in spoken(ast.parse(source))) == own


def test_ranges_of_numbers_are_said_in_one_wording():
    """By ``fedcore.arguments``: ``whole``, ``real``, or their words, ``due_whole`` and ``due_in``."""
    found = [
        f"{file.relative_to(ROOT)}: {text}"
        for file in FILES
        if file.name != "arguments.py"
        for text in spoken(ast.parse(file.read_text()))
        if RANGE_IN_OWN_WORDS.search(text)
    ]
    assert found == []
