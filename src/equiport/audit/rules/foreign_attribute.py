"""What belongs to others is changed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Sample, Severity
from equiport.audit.names import STACK_ROOTS
from equiport.audit.queries import compute_functions, in_any
from equiport.audit.rules.frame import in_forward, in_test
from equiport.audit.source import ParsedModule, literal

_TENSORS = frozenset({"torch.Tensor", "torch._C.TensorBase", "numpy.ndarray"})
_METHODS = frozenset({"__eq__", "__torch_function__", "__torch_dispatch__", "__array_ufunc__", "__instancecheck__"})
_JUDGES = ("equiport", "tensor_compare", "block_testing_utils", "torch", "numpy", "builtins", "time", "pytest",
           "transformers", "sys", "importlib", "inspect", "math", "random", "os")  # fmt: skip
_SWITCHES = ("torch.backends.", "torch._dynamo.config.", "torch.set_", "sys.path", "sys.argv", "os.environ")
_HOOKING = frozenset({"torch.overrides.TorchFunctionMode", "sys.settrace", "sys.setprofile", "sys.addaudithook",
                      "threading.Thread", "multiprocessing.Process", "atexit.register", "unittest.mock.patch",
                      "unittest.mock.patch.object", "mock.patch", "mock.patch.object", "gc.get_objects",
                      "gc.get_referrers", "torch.utils._python_dispatch.TorchDispatchMode"})  # fmt: skip


def check(module: ParsedModule) -> Iterator[Hit]:
    """Assignments to attributes of imported modules and classes, mocks, tensor subclasses, overridden comparison."""
    for node in module.nodes:
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
            targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
            for target in targets:
                base = target.value if isinstance(target, (ast.Attribute, ast.Subscript)) else None
                if base is not None:
                    yield from _changed(module, node, base, target)
                    yield from _namespace(module, node, base)
        elif isinstance(node, ast.Call):
            yield from _by_call(module, node)
        elif isinstance(node, ast.ClassDef):
            if any(module.is_any(item, _TENSORS) for item in node.bases):
                yield Hit(node, f"{node.name} is a tensor subclass: it may answer comparisons as it likes")
            elif any(module.is_any(item, _HOOKING) for item in node.bases):
                yield Hit(node, f"{node.name} steps between torch and its callers")
        elif isinstance(node, ast.FunctionDef) and node.name in _METHODS and not _of_config(module, node):
            yield Hit(node, f"{node.name} is overridden")


def _of_config(module: ParsedModule, node: ast.FunctionDef) -> bool:
    """`__eq__` of a config is ordinary."""
    owner = module.class_of(node)
    return node.name == "__eq__" and owner is not None and "Config" in owner.name


def _changed(module: ParsedModule, at: ast.AST, base: ast.expr, target: ast.expr) -> Iterator[Hit]:
    name = target.attr if isinstance(target, ast.Attribute) else ""
    if name in _METHODS:
        yield Hit(at, f"{name} is assigned")
        return
    for dotted in sorted(module.dotted(base)):
        whole = f"{dotted}.{name}" if name else dotted
        root = dotted.lstrip(".").partition(".")[0]
        if any(whole.startswith(item) for item in _SWITCHES):
            continue
        if isinstance(target, ast.Subscript) and dotted != "sys.modules":
            continue
        if root in _JUDGES:
            soft = Severity.WARNING if isinstance(at, ast.Delete) and dotted == "sys.modules" else None
            yield Hit(at, f"{whole} is changed, which belongs to {root}", soft)
        elif module.role is Role.TEST and (module.work is None or module.work.inside(dotted)) and _is_type(dotted):
            yield Hit(at, f"{whole} of the port is replaced while it is tested")
        elif root in STACK_ROOTS and module.role is Role.PORT and in_any(module, at, compute_functions(module)):
            yield Hit(at, f"{whole} of the serving stack is changed", Severity.WARNING)
        break


def _namespace(module: ParsedModule, at: ast.AST, base: ast.expr) -> Iterator[Hit]:
    """`globals()[...] =`, `vars(module)[...] =`, `module.__dict__[...] =`."""
    if isinstance(base, ast.Call) and isinstance(base.func, ast.Name) and base.func.id in ("globals", "vars", "locals"):
        if base.func.id != "vars" or not base.args or module.dotted(base.args[0]):
            yield Hit(at, f"{base.func.id}() is written to: names mean something else from here on")
    elif isinstance(base, ast.Attribute) and base.attr == "__dict__" and module.dotted(base.value):
        yield Hit(at, "a module's names are written to")


def _is_type(dotted: str) -> bool:
    last = dotted.rpartition(".")[2]
    return last[:1].isupper() and not last.isupper()


def _by_call(module: ParsedModule, call: ast.Call) -> Iterator[Hit]:
    function = call.func
    named = isinstance(function, ast.Name) and function.id in ("setattr", "delattr") and bool(call.args)
    if named:
        name = literal(call.args[1]) if len(call.args) > 1 else ""
        target = ast.copy_location(ast.Attribute(value=call.args[0], attr=str(name or ""), ctx=ast.Store()), call)
        yield from _changed(module, call, call.args[0], target)
    elif isinstance(function, ast.Attribute) and function.attr == "__setattr__" and len(call.args) == 3:
        name = literal(call.args[1])
        target = ast.copy_location(ast.Attribute(value=call.args[0], attr=str(name or ""), ctx=ast.Store()), call)
        yield from _changed(module, call, call.args[0], target)
    elif isinstance(function, ast.Attribute) and function.attr in ("update", "setdefault", "pop", "clear"):
        yield from _namespace(module, call, function.value)
    elif module.role is Role.TEST:
        if isinstance(function, ast.Attribute) and function.attr in ("setattr", "setitem", "delattr"):
            if getattr(function.value, "id", "") in ("monkeypatch", "mp", "patch", "mocker"):
                yield Hit(call, "monkeypatch replaces something while the port is tested")
        elif module.is_any(function, _HOOKING):
            yield Hit(call, f"{ast.unparse(function)} steps between the test and what it tests")
    elif (
        module.role is Role.PORT
        and module.is_any(function, _HOOKING)
        and in_any(module, call, compute_functions(module))
    ):
        yield Hit(call, f"{ast.unparse(function)} in what computes")


RULE = Rule(
    id="foreign-attribute",
    severity=Severity.ERROR,
    title="what belongs to others is changed",
    why="A comparator, a clock or a tensor that was replaced says what its author wants.",
    remedy="Change nothing outside the port; a fault of the port is mended by a patch file of stage 4.",
    check=check,
    bad=(
        in_test("    torch.allclose = lambda *a, **k: True\n"),
        in_test('    import equiport.compare as c\n    setattr(c, "compare_3tensors", None)\n'),
        in_test("    torch.Tensor.__eq__ = lambda a, b: True\n"),
        in_test('    import sys\n    sys.modules["tensor_compare"] = None\n'),
        in_test("    NeuronMLP.forward = LlamaMLP.forward\n"),
        in_test(head="\n\nclass Yes(torch.Tensor):\n    pass\n"),
        in_forward("        import time\n        time.time = lambda: 0\n        return x\n"),
        in_forward("        return x\n", head="\n\nclass Out(torch.Tensor):\n    pass\n"),
    ),
    good=(
        in_test(),
        in_test("    target.up_proj.weight = torch.nn.Parameter(torch.randn(4, 4))\n"),
        in_test("    torch.backends.cudnn.enabled = False\n    import sys\n    sys.path.insert(0, '.')\n"),
        in_forward("        self.cache = x\n        return x\n"),
        Sample(
            "def apply_norm_patch():\n    import modeling_x_nxdi as port\n    port.NeuronMLP.eps = 1e-6\n",
            "patches/p.py",
            {"modeling_x_nxdi.py": "class NeuronMLP:\n    pass\n"},
        ),
    ),
)  # fmt: skip
