"""Files made to break the audit: each ends in a finding, never in a crash, and quickly."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from equiport.audit import audit_path

HOSTILE: dict[str, bytes] = {
    "not utf-8": b"x = '\xff\xfe'\n",
    "null bytes": b"x = 1\x00\n",
    "no python": b"def (:\n",
    "parentheses": b"x = " + b"(" * 5000 + b"1" + b")" * 5000 + b"\n",
    "signs": b"x = " + b"-" * 20000 + b"1\n",
    "a long sum": b"x = " + b"1+" * 20000 + b"1\n",
    "nested calls": b"x = " + b"f(" * 150 + b"1" + b")" * 150 + b"\n" + b"y = x" + b".a" * 5000 + b"\n",
    "11 MB": b"# " + b"x" * 11_000_000 + b"\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_read_is_opaque(name: str, tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_bytes(HOSTILE[name])
    clock = time.monotonic()
    found = audit_path(tmp_path)
    assert not found.clean and {item.rule for item in found.counting} == {"opaque"}, found.findings
    assert time.monotonic() - clock < 10


def test_names_that_go_in_circles_end(tmp_path: Path) -> None:
    circles = "\n".join(f"    v{n} = v{(n + 1) % 60} + v{(n * 7) % 60} + f{n % 5}(v{n})" for n in range(60))
    functions = "\n".join(f"def f{n}(x):\n    y = f{(n + 1) % 5}(x)\n    return f{(n + 2) % 5}(y)\n" for n in range(5))
    (tmp_path / "test_x.py").write_text(
        f"import torch\n{functions}\nclass A(B):\n    pass\nclass B(A):\n    pass\n\ndef test_x():\n{circles}\n"
        "    assert torch.allclose(v1, v2)\n"
    )
    clock = time.monotonic()
    found = audit_path(tmp_path)
    assert time.monotonic() - clock < 15 and found.files


def test_files_that_import_one_another_end(tmp_path: Path) -> None:
    for one, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{one}.py").write_text(
            f"from {other} import *\nfrom {other} import value\nvalue = value\nx = value\n"
        )
    (tmp_path / "test_x.py").write_text(
        "from a import *\nfrom tensor_compare import compare_3tensors, check_3tensor_result\n\n"
        "def test_x():\n    assert check_3tensor_result(compare_3tensors(value, x, value), 'x', 1.2)\n"
    )
    assert "same-source" in {item.rule for item in audit_path(tmp_path).counting}


def test_a_broken_link_is_opaque_and_bom_is_not(tmp_path: Path) -> None:
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "bom.py").write_bytes(b"\xef\xbb\xbfx = 1\n")
    found = audit_path(tmp_path)
    assert [(item.rule, item.file) for item in found.counting] == [("opaque", "gone.py")]


def test_nothing_of_what_is_audited_runs(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(3)\n")
    audit_path(tmp_path)
    assert not (tmp_path / "ran").exists()


HIDING: dict[str, str] = {
    "nested functions": "    def a():\n        def b():\n            exec('x = 1')\n        b()\n    a()\n",
    "a lambda in a default": "    def f(run=lambda: eval('1')):\n        return run()\n    f()\n",
    "a decorator made of text": "    @eval('lambda f: f')\n    def g():\n        pass\n",
    "a class body": "    class C:\n        exec('y = 2')\n",
    "a comprehension": "    [eval(text) for text in ('1', '2')]\n",
    "an f-string": "    print(f\"{eval('1')}\")\n",
    "an alias of an alias": "    run = eval\n    again = run\n    again('1')\n",
    "a conditional import": "    import importlib as il\n    name = 'trans' + 'formers'\n    il.import_module(name)\n",
    "an alias of __import__": "    load = __import__\n    load('tor' + 'ch')\n",
    "getattr of builtins": "    import builtins\n    getattr(builtins, 'ev' + 'al')('1')\n",
    "a frame": "    import sys\n    sys._getframe().f_back.f_globals['x'] = 1\n",
    "code objects": "    import types\n    types.FunctionType(compile('1', '', 'eval'), {})\n",
}


@pytest.mark.parametrize("name", HIDING)
def test_code_that_hides_is_opaque(name: str, tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import torch\nfrom tensor_compare import check_3tensor_result, compare_3tensors\n\n\ndef test_x():\n"
        + HIDING[name]
    )
    found = {item.rule for item in audit_path(tmp_path).counting}
    assert found & {"opaque", "outside-world"}, found


def test_a_file_that_grows_while_it_is_read_and_a_folder_named_like_one(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "folder.py" / "test_y.py").write_text("def test_y():\n    assert True\n")
    (tmp_path / "test_deep.py").write_text("x = [" * 200 + "]" * 200 + "\n")
    found = audit_path(tmp_path)
    assert {item.rule for item in found.counting} >= {"no-comparison"}
