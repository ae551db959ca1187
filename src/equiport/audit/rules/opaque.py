"""Code that cannot be read: dynamic constructs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Sample, Severity
from equiport.audit.names import STARRED
from equiport.audit.rules.frame import in_forward, in_test
from equiport.audit.source import ParsedModule, literal

_EXECUTING = frozenset({"exec", "eval", "compile", "builtins.exec", "builtins.eval", "builtins.compile"})
_IMPORTING = frozenset({"importlib.import_module", "__import__", "importlib.__import__"})
_INSIDES = frozenset({"__globals__", "__subclasses__", "__builtins__", "__code__", "__closure__", "f_globals",
                      "f_locals", "f_back", "tb_frame", "__loader__"})  # fmt: skip
_BY_PATH = frozenset({"importlib.util.spec_from_file_location", "runpy.run_path", "runpy.run_module",
                      "importlib.machinery.SourceFileLoader"})  # fmt: skip
_MAKING_CODE = frozenset({"marshal.loads", "marshal.load", "types.FunctionType", "types.CodeType", "dill.loads",
                          "cloudpickle.loads", "code.interact"})  # fmt: skip
_BY_NAME = frozenset({"operator.attrgetter", "operator.methodcaller"})
_WATCHED = ("torch", "transformers", "equiport", "tensor_compare", "block_testing_utils", "builtins", "pytest", "numpy")


def check(module: ParsedModule) -> Iterator[Hit]:
    """exec and eval, imports and attributes whose name is computed, star imports of what is not known."""
    soft = None if module.role is Role.TEST else Severity.WARNING
    for call in module.calls:
        executing = module.is_any(call.func, _EXECUTING)
        if executing:
            yield Hit(call, f"{executing} runs text that is not in the file", soft)
        elif module.is_any(call.func, _IMPORTING) and not isinstance(literal(call.args[0] if call.args else None), str):
            yield Hit(call, "imports a module whose name is computed", soft)
        elif module.is_any(call.func, _MAKING_CODE):
            yield Hit(call, "makes code out of data", soft)
        elif module.is_any(call.func, _BY_NAME) and not all(isinstance(literal(item), str) for item in call.args[:1]):
            yield Hit(call, "takes an attribute whose name is computed", soft)
        elif module.is_any(call.func, _BY_PATH):
            yield Hit(call, "loads a file by its path: put its folder on sys.path and import it", Severity.WARNING)
        elif _computed_attribute(module, call):
            yield Hit(call, "takes an attribute whose name is computed", soft)
    for node in module.nodes:
        if isinstance(node, ast.Name) and _renamed(module, node):
            yield Hit(node, f"{node.id} is given another name", soft)
        if isinstance(node, ast.Attribute) and node.attr in _INSIDES and module.role is not Role.SUPPORT:
            yield Hit(node, f"{node.attr} reaches what the file does not name")
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            known = node.level or node.module in STARRED or (module.work and module.work.module(node.module or ""))
            if not known:
                yield Hit(node, f"star import of {node.module}: its names cannot be followed", soft)


def _renamed(module: ParsedModule, node: ast.Name) -> bool:
    """A builtin that runs text, or imports by text, that is kept or handed over and not called where it stands."""
    if node.id not in ("eval", "exec", "__import__") or not isinstance(node.ctx, ast.Load):
        return False
    parent = module.parents.get(node)
    called = isinstance(parent, ast.Call) and parent.func is node
    return not called and bool(module.is_any(node, frozenset({node.id})))


def _computed_attribute(module: ParsedModule, call: ast.Call) -> bool:
    if not (isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) >= 2):
        return False
    if literal(call.args[1]) is not None:
        return False
    roots = {name.lstrip(".").partition(".")[0] for name in module.dotted(call.args[0])}
    # activations are looked up by the config's name, dtypes by their own
    return (
        bool(roots & set(_WATCHED))
        and module.role is not Role.PORT
        and not (roots == {"torch"} and _dtype(module, call))
    )


def _dtype(module: ParsedModule, call: ast.Call) -> bool:
    """Whether what is looked up is called a dtype: `dtype = getattr(torch, name)`, `f(torch_dtype=getattr(...))`."""
    for outer in module.around(call):
        if isinstance(outer, ast.keyword):
            return "dtype" in (outer.arg or "")
        if isinstance(outer, (ast.Assign, ast.AnnAssign)):
            targets = outer.targets if isinstance(outer, ast.Assign) else [outer.target]
            return all("dtype" in ast.unparse(target) for target in targets)
        if isinstance(outer, ast.Call) and call is outer.func:
            return False
        if isinstance(outer, (ast.Return, ast.stmt)):
            break
    function = module.function_of(call)
    return function is not None and "dtype" in function.name


RULE = Rule(
    id="opaque",
    severity=Severity.ERROR,
    title="code that cannot be read",
    why="What is put together at run time can be anything; nothing can be said about it.",
    remedy="Write the import, the attribute or the statement out.",
    check=check,
    bad=(
        in_test('    exec("out3 = out1")\n'),
        in_test('    out3 = eval("out" + "1")\n'),
        in_test('    compare = getattr(torch, "all" + "close")\n'),
        in_forward("        return type(x).__init__.__globals__['LlamaMLP'](x)\n"),
        in_forward("        return torch.nn.Module.__subclasses__()[7](x)\n"),
        in_forward("        import importlib\n        return importlib.import_module('trans' + 'formers').x(x)\n"),
        in_test("    run = eval\n    out3 = run('out1')\n"),
        Sample("from somewhere import *\n\ndef test_x():\n    assert run() == 1\n"),
    ),
    good=(
        in_test(),
        in_test('    dtype = getattr(torch, "float32")\n'),
        in_forward("        return getattr(self, self.kind)(x)\n"),
        in_forward("        self.eval()\n        return torch.compile(self.inner)(x)\n"),
    ),
)
