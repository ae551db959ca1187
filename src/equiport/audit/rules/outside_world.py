"""Files, environment, processes and frames in tests and in what computes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.flow import FILE, READERS
from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.queries import comparisons, compute_functions, in_any
from equiport.audit.rules.frame import in_forward, in_test
from equiport.audit.source import ParsedModule, literal

_FRAMES = frozenset({"sys._getframe", "inspect.currentframe", "inspect.stack", "sys._current_frames",
                     "inspect.getouterframes",
                     "traceback.extract_stack", "inspect.getsource"})  # fmt: skip
_STORED = frozenset({"torch.load", "numpy.load", "pickle.load", "pickle.loads", "joblib.load"})
_PROCESSES = ("subprocess.", "os.system", "os.popen", "os.exec", "os.spawn", "os.fork", "git.", "pexpect.", "socket.",
              "urllib.", "requests.", "multiprocessing.", "ctypes.")  # fmt: skip
_WRITERS = frozenset({"torch.save", "numpy.save", "numpy.savez", "numpy.savetxt", "pickle.dump"})
_WRITING_METHODS = frozenset({"write_text", "write_bytes"})
_READING_METHODS = frozenset({"read_text", "read_bytes"})
_ENVIRONMENT = frozenset({"os.environ", "os.getenv", "os.environ.get"})
#: Where something lies, which a test may be told.
_PLACES = ("PATH", "DIR", "HOME", "CACHE", "FOLDER")
_LOADED = frozenset({"sys.modules", "sys.argv", "sys.path"})
_TELLING = ("PYTEST_", "EQUIPORT_", "CI")


def check(module: ParsedModule) -> Iterator[Hit]:
    """Golden files, processes, frames and environment; signs by which code can tell that it is being tested."""
    if module.role not in (Role.TEST, Role.PORT):
        return
    computing = compute_functions(module) if module.role is Role.PORT else set()
    golden = _golden(module) if module.role is Role.TEST else set()
    for node in module.nodes:
        inside = module.role is Role.TEST or in_any(module, node, computing)
        if isinstance(node, (ast.Name, ast.Attribute)) and module.dotted(node):
            yield from _told(module, node, inside)
        if isinstance(node, ast.Compare) and _modules_asked(module, node):
            yield Hit(node, "asks whether pytest or the toolkit is loaded")
        if module.role is Role.PORT and isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from _judges(node)
        if module.role is Role.PORT and isinstance(node, ast.Call) and _stored(module, node):
            yield Hit(node, "loads stored values when it is built")
        if isinstance(node, ast.Call) and inside:
            yield from _call(module, node, node in golden)


def _judges(node: ast.Import | ast.ImportFrom) -> Iterator[Hit]:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for name in names:
        if name.partition(".")[0] in ("equiport", "pytest", "_pytest", "tensor_compare", "block_testing_utils"):
            yield Hit(node, f"the port imports {name}, by which it is judged")


def _stored(module: ParsedModule, call: ast.Call) -> bool:
    """torch.load and the like at the top of the file or in a constructor."""
    function = module.function_of(call)
    builds = function is None or function.name in ("__init__", "init_model", "setup_attr_for_model")
    return builds and bool(module.dotted(call.func) & _STORED)


def _told(module: ParsedModule, node: ast.Name | ast.Attribute, inside: bool) -> Iterator[Hit]:
    parent = module.parents.get(node)
    if isinstance(parent, ast.Attribute) and module.dotted(parent) & _ENVIRONMENT:
        return
    if module.is_any(node, _FRAMES) and inside:
        yield Hit(node, "looks at who called it")
    if module.role is Role.PORT and inside and module.is_any(node, _LOADED):
        yield Hit(node, "looks at what else is loaded")
    if module.is_any(node, _ENVIRONMENT) and isinstance(parent, (ast.Call, ast.Subscript, ast.Compare, ast.Attribute)):
        key = _key(parent)
        writes = isinstance(parent, ast.Subscript) and not isinstance(parent.ctx, ast.Load)
        method = parent.attr if isinstance(parent, ast.Attribute) else ""
        if isinstance(key, str) and key.startswith(_TELLING) and not writes:
            yield Hit(node, f"reads {key}, by which it can tell that it is being tested")
        elif inside and not writes and method not in ("setdefault", "update", "pop", "copy"):
            place = module.role is Role.TEST and isinstance(key, str) and any(word in key for word in _PLACES)
            soft = Severity.NOTE if place else Severity.WARNING
            yield Hit(node, "what is computed depends on the environment", soft)


def _key(parent: ast.AST) -> object:
    if isinstance(parent, ast.Call):
        return literal(parent.args[0]) if parent.args else None
    if isinstance(parent, ast.Subscript):
        return literal(parent.slice)
    return literal(parent.left) if isinstance(parent, ast.Compare) else None


def _modules_asked(module: ParsedModule, node: ast.Compare) -> bool:
    asked = isinstance(literal(node.left), str) and str(literal(node.left)).startswith(
        ("pytest", "_pytest", "equiport")
    )
    return asked and any("sys.modules" in module.dotted(item) for item in node.comparators)


def _call(module: ParsedModule, call: ast.Call, golden: bool) -> Iterator[Hit]:
    names = module.dotted(call.func)
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if any(name.startswith(_PROCESSES) for name in names):
        yield Hit(call, f"{ast.unparse(call.func)} leaves the process")
    elif names & _WRITERS:
        yield Hit(call, "stores values that a later run may read")
    elif module.role is Role.PORT and method in _WRITING_METHODS or _opens(module, call, "wax+"):
        yield Hit(call, "writes a file", Severity.WARNING)
    elif golden:
        yield Hit(call, "the compared value is read from a file")
    elif module.role is Role.PORT and (names & READERS or method in _READING_METHODS or _opens(module, call, "r")):
        yield Hit(call, "reads a file while it computes")


def _opens(module: ParsedModule, call: ast.Call, modes: str) -> bool:
    if not (isinstance(call.func, ast.Name) and call.func.id == "open" and not module.dotted(call.func)):
        return False
    given = {item.arg: item.value for item in call.keywords}
    mode = literal(given.get("mode", call.args[1] if len(call.args) > 1 else ast.Constant("r")))
    return isinstance(mode, str) and any(letter in mode for letter in modes)


def _golden(module: ParsedModule) -> set[ast.AST]:
    """Calls that read a file and whose value reaches a comparison."""
    sides = [side for item in comparisons(module) for side in item.sides]
    asserts = [node.test for node in module.nodes if isinstance(node, ast.Assert)]
    if not any(FILE in module.flow.origins(side) for side in [*sides, *asserts]):
        return set()
    found: set[ast.AST] = set()
    for call in module.calls:
        reads = module.dotted(call.func) & READERS or _opens(module, call, "r")
        if (reads or getattr(call.func, "attr", "") in _READING_METHODS) and not _of_config(module, call):
            found.add(call)
    return found


def _of_config(module: ParsedModule, call: ast.Call) -> bool:
    """Reads a config, by what is read or what it is called."""
    parent = module.parents.get(call)
    targets = parent.targets if isinstance(parent, ast.Assign) else []
    return any("config" in ast.unparse(item).lower() for item in (call, *targets))


RULE = Rule(
    id="outside-world",
    severity=Severity.ERROR,
    title="files, processes, frames or environment decide",
    why="Expected values that were stored once, or code that sees that it is being tested, can say anything.",
    remedy="Compute both sides in the test from the same inputs; a port computes from its arguments and its config.",
    check=check,
    bad=(
        in_test('    out1 = torch.load("expected.pt")\n'),
        in_test('    torch.save(out3, "expected.pt")\n'),
        in_test('    import subprocess as s\n    s.run(["git", "stash"])\n'),
        in_forward('        return torch.load("answer.pt")\n'),
        in_forward("        import sys\n        return x if sys._getframe(1) else -x\n"),
        in_forward('        import os\n        return x if "PYTEST_CURRENT_TEST" in os.environ else -x\n'),
        in_forward('        import os\n        return x if os.environ.get("FAST") else -x\n'),
        in_forward("        return x\n", head="import pytest\n"),
        in_forward("        return self.t\n", body="    def __init__(self):\n        self.t = torch.load('t.pt')\n"),
        in_forward('        import sys\n        return x if "pytest" in sys.modules else -x\n'),
    ),
    good=(
        in_test(head='import os\nos.environ["NXD_CPU_MODE"] = "1"\nos.environ.setdefault("OMP_NUM_THREADS", "1")\n'),
        in_test('    target.load_state_dict(torch.load("weights.bin"))\n'),
        in_forward(
            "        return x\n",
            body='    def compile(self):\n        import os\n        os.environ["NEURON_CC_FLAGS"] = "-O1"\n',
        ),
    ),
)
