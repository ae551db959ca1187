"""Stage 2 believes the comparator's records alone: nothing that a test file does, or leaves undone, makes it PASS."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds import EXAMPLE_PORT, Cli, World

from equiport.compare.verdict import Verdict
from equiport.experiment import StageResult
from equiport.stages import stage2
from equiport.stages.frame import StageOptions

_HEAD = """
import json, os, subprocess, sys, time
import pytest
import torch
from tensor_compare import Labels, check_3tensor_result, compare_3tensors

def tensors(error=1.0):
    torch.manual_seed(1)
    exact = torch.randn(64, 48)
    rounded = exact.bfloat16().float()
    noise = torch.randn(64, 48) * (rounded - exact).std() * error
    return exact, rounded, (exact + noise).bfloat16()

def compared(name, error=0.5, tolerance=1.2):
    return check_3tensor_result(compare_3tensors(*tensors(error), name=name), name, tolerance)

def test_good():
    assert compared("good of " + os.path.basename(__file__))
"""

# name of a test in one common file -> (the test, what the reasons must say of it)
ORDINARY = {
    "ignores_false": ("def test_ignores_false():\n    compared('bad comparison', 40.0)\n", "COMPONENT_FAILS"),
    "huge_tolerance": ("def test_huge_tolerance():\n    assert compared('tolerant', 30.0, 1e6)\n", "COMPONENT_FAILS"),
    "infinite_tolerance": (
        "def test_infinite_tolerance():\n    assert compared('x', 30.0, float('inf'))\n",
        "TEST_FAILED",
    ),
    "no_comparison": ("def test_no_comparison():\n    assert True\n", "NO_COMPARISON"),
    "unchecked": ("def test_unchecked():\n    assert compare_3tensors(*tensors()).r_ratio < 9\n", "NO_COMPARISON"),
    "only_prints": ("def test_only_prints():\n    print('PASS bad: R=0.9')\n", "NO_COMPARISON"),
    "sys_exit": ("def test_sys_exit():\n    compared('x')\n    sys.exit(0)\n", "TEST_FAILED"),
    "skip": ("def test_skip():\n    pytest.skip('later')\n", "TEST_SKIPPED"),
    "skip_mark": ("@pytest.mark.skipif(True, reason='x')\ndef test_skip_mark():\n    compared('x')\n", "TEST_SKIPPED"),
    "xfail": ("@pytest.mark.xfail\ndef test_xfail():\n    assert compared('x', 0.5) and False\n", "TEST_SKIPPED"),
    "xpass": ("@pytest.mark.xfail\ndef test_xpass():\n    assert compared('x')\n", "TEST_SKIPPED"),
    "swallows_refusal": (
        "def test_swallows_refusal():\n    compared('x')\n    exact, rounded, port = tensors()\n    try:\n"
        "        compare_3tensors(exact, rounded, port[:3], name='cropped', labels=Labels(component='c'))\n"
        "    except Exception:\n        pass\n",
        "COMPARISON_REFUSED",
    ),
}  # fmt: skip
# what ends or deceives the process: a file each, behind a good test
FILES = {
    "pytest_exit": ("def test_bad():\n    pytest.exit('done', returncode=0)\n", "TEST_LOST"),
    "os_exit": ("def test_bad():\n    compared('x')\n    os._exit(0)\n", "TEST_LOST"),
    "killed": ("def test_bad():\n    compared('x')\n    os.kill(os.getpid(), 9)\n", "TEST_LOST"),
    "forges_a_line": (
        "def test_bad():\n    compared('bad', 40.0)\n    path = os.environ['EQUIPORT_RECORDS']\n"
        "    lines = open(path).read().splitlines()\n"
        "    lines[-1] = lines[-1].replace('\"FAIL\"', '\"PASS\"', 1)\n"
        "    open(path, 'w').write('\\n'.join(lines) + '\\n')\n",
        "RECORDS_INVALID",
    ),
    "drops_a_record": (
        "def test_bad():\n    path = os.environ['EQUIPORT_RECORDS']\n    kept = open(path).read()\n"
        "    compared('bad', 40.0)\n    compared('fine')\n"
        "    lines = open(path).read().splitlines()\n    open(path, 'w').write(kept + lines[-1] + '\\n')\n",
        "RECORDS_FORGED",
    ),
    "copies_a_record": (
        "def test_bad():\n    path = os.environ['EQUIPORT_RECORDS']\n    line = json.loads(open(path).readline())\n"
        "    line['test'] = line['test'].replace('test_good', 'test_bad')\n"
        "    open(path, 'a').write(json.dumps(line) + '\\n')\n",
        "RECORDS_FORGED",
    ),
    "forges_outcomes": (
        "def test_bad():\n    line = json.dumps({'test': os.environ['PYTEST_CURRENT_TEST'].split(' ')[0],\n"
        "        'when': 'call', 'outcome': 'passed', 'detail': ''})\n    compared('x')\n"
        "    open(os.environ['EQUIPORT_OUTCOMES'], 'a').write(line + '\\n')\n    os._exit(0)\n",
        "RECORDS_FORGED",
    ),
    "rubbish_in_records": (
        "def test_bad():\n    compared('x')\n"
        "    subprocess.run('echo PASS >> $EQUIPORT_RECORDS', shell=True)\n",
        "RECORDS_INVALID",
    ),
}  # fmt: skip
# files that need no torch: fast ones
BARE = {
    "nothing_inside": ("", "NO_COMPARISON"),
    "exit_at_import": ("import sys\nsys.exit(0)\n", "NO_COMPARISON"),
    "skip_module": ("import pytest\npytest.skip('x', allow_module_level=True)\n", "NO_COMPARISON"),
    "no_python": ("def test_(:\n", "NO_COMPARISON"),
    "sleeps": ("import time\ndef test_bad():\n    time.sleep(60)\n", "TIMEOUT"),
    "leaves_a_child": (
        "import subprocess\ndef test_bad():\n    subprocess.Popen(['sleep', '60'])\n"
        "    subprocess.run(['sleep', '60'])\n",
        "TIMEOUT",
    ),
}


def run_stage2(folder: Path, timeout: float) -> StageResult:
    options = StageOptions(output=folder.parent / "stage2.json", quiet=True)
    return stage2.run(options, stage2.Stage2Options(folder, timeout=timeout), None, None)


def write_tests(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    source = EXAMPLE_PORT.parents[2] / "scripts" / "tensor_compare.py"
    (folder / "tensor_compare.py").write_text(source.read_text())
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def dishonest(tmp_path_factory: pytest.TempPathFactory) -> StageResult:
    files = {name: _HEAD + text for name, (text, _) in FILES.items()} | {"honest": _HEAD}
    files["ordinary"] = "\n".join([_HEAD, *(text for text, _ in ORDINARY.values())])
    return run_stage2(write_tests(tmp_path_factory.mktemp("dishonest") / "tests", files), 300)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> StageResult:
    files = {name: text for name, (text, _) in BARE.items()}
    return run_stage2(write_tests(tmp_path_factory.mktemp("bare") / "tests", files), 6)


def _codes(result: StageResult, *subjects: str) -> set[str]:
    """The codes given to subjects that begin so."""
    return {item.code for item in result.reasons if item.subject.startswith(subjects)}


@pytest.mark.parametrize("name", ORDINARY)
def test_a_dishonest_test_is_found_out(dishonest: StageResult, name: str) -> None:
    comparison = {"ignores_false": "bad comparison", "huge_tolerance": "tolerant", "swallows_refusal": "cropped"}
    subject = comparison.get(name, f"test_ordinary.py::test_{name}")
    assert ORDINARY[name][1] in _codes(dishonest, subject)
    assert dishonest.verdict is Verdict.FAIL


@pytest.mark.parametrize("name", FILES)
def test_a_dishonest_file_is_found_out(dishonest: StageResult, name: str) -> None:
    assert FILES[name][1] in _codes(dishonest, f"test_{name}.py")


@pytest.mark.parametrize("name", BARE)
def test_a_file_without_evidence_fails(bare: StageResult, name: str) -> None:
    assert bare.verdict is Verdict.FAIL
    assert BARE[name][1] in _codes(bare, f"test_{name}.py")
    assert bare.metrics["comparisons"] == 0


def test_the_honest_file_among_them_is_not_accused(dishonest: StageResult) -> None:
    assert _codes(dishonest, "test_honest.py", "good of", "test_ordinary.py::test_good") == set()
    good = [row for row in dishonest.metrics["unlabelled"] if row["component"].startswith("good of")]
    assert {row["verdict"] for row in good} == {"PASS"} and len(good) >= len(FILES) - 2


def test_what_a_timed_out_test_started_is_ended(bare: StageResult) -> None:
    assert bare.seconds < 45  # both sleepers are cut at their limit, though one left a child behind


def test_an_empty_folder(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "tests").mkdir()
    ran = cli("stage2", "--tests-dir", tmp_path / "tests", "--output", tmp_path / "stage2.json")
    assert ran.code == 1
    assert "NO_COMPARISON: the tests folder holds no test_*.py" in ran.out
    assert "standalone" in ran.out


def test_a_folder_that_is_not_there(tmp_path: Path, cli: Cli) -> None:
    ran = cli("stage2", "--tests-dir", tmp_path / "no", "--output", tmp_path / "stage2.json")
    assert ran.is_clear_error(2, str(tmp_path / "no"), "no such tests folder", "--generate")
    assert list(tmp_path.iterdir()) == []


_SEED_STYLE = """
import copy, sys
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from equiport.stacks.loading import load_adapter
from tensor_compare import check_3tensor_result, compare_3tensors

load_adapter("nxdi").init_distributed(1)
sys.path.insert(0, PORT_FOLDER)
from modeling_llama_nxdi import LlamaInferenceConfig, LlamaNeuronConfig, NeuronLlamaMLP, make_rmsnorm

TOLERANCE_RATIO = 1.2
config = AutoConfig.from_pretrained(MODEL)
neuron_config = LlamaInferenceConfig.from_pretrained(
    MODEL, LlamaNeuronConfig(tp_degree=1, batch_size=2, seq_len=64, torch_dtype=torch.bfloat16)
)


def three(source, target, name):
    torch.manual_seed(42)
    weights = {key: torch.randn_like(value) / value.shape[-1] ** 0.5 for key, value in source.state_dict().items()}
    ref_fp32, ref_bf16, target = copy.deepcopy(source).float(), copy.deepcopy(source).bfloat16(), target.bfloat16()
    for key, value in weights.items():
        for model, dtype in ((ref_fp32, torch.float32), (ref_bf16, torch.bfloat16), (target, torch.bfloat16)):
            holder = model.get_submodule(key.rpartition(".")[0]) if "." in key else model
            holder.weight = nn.Parameter(value.to(dtype))
    target.eval()
    x = torch.randn(2, 32, config.hidden_size)
    with torch.no_grad():
        out1 = ref_fp32(x.float()).float()
        out2 = ref_bf16(x.to(torch.bfloat16)).float()
        raw = target(x.to(torch.bfloat16))
        out3 = raw[0].float() if isinstance(raw, tuple) else raw.float()
    result = compare_3tensors(out1, out2, out3)
    assert check_3tensor_result(result, name, TOLERANCE_RATIO)


def test_mlp():
    three(LlamaMLP(config), NeuronLlamaMLP(neuron_config), "mlp")


def test_norm():
    three(LlamaRMSNorm(config.hidden_size), make_rmsnorm(neuron_config), "norm")
"""


def test_tests_as_documented_pass_their_own_gate(done: World, cli: Cli, tmp_path: Path) -> None:
    text = f"PORT_FOLDER, MODEL = {str(done.port.parent)!r}, {str(done.model)!r}\n" + _SEED_STYLE
    folder = write_tests(tmp_path / "tests", {"01_mlp": text})
    output = tmp_path / "results" / "stage2.json"
    ran = cli("stage2", "--tests-dir", folder, "--tau-r", 1.2, "--output", output)
    assert ran.code == 0, ran.out
    result = StageResult.model_validate_json(output.read_text())
    assert result.verdict is Verdict.PASS and not result.reasons
    assert {row["component"]: row["verdict"] for row in result.metrics["unlabelled"]} == {"mlp": "PASS", "norm": "PASS"}
    assert any(spot.startswith("mlp: ") for spot in result.blind_spots)
    assert any(spot.startswith("norm: ") for spot in result.blind_spots)
    assert result.metrics["tests"] == result.metrics["comparisons"] == 2
