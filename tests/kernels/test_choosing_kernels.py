"""Which kernels run: by environment, by CPU, and where none are compiled."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvine import kernels
from kvine.errors import ConfigError

SAY = "from kvine import kernels; k = kernels.chosen(); print(k.name if k else None)"
# What an installation without a compiler looks like: the extension cannot be imported.
BLOCKED = "import sys; sys.modules['kvine.kernels._native'] = None\n"
PRODUCT = """
import torch
from kvine import kernels
from kvine.models.matmul import choose_product
x, weight = torch.ones(1, 3).bfloat16(), torch.ones(2, 3).bfloat16()
for _ in range(2):
    y = choose_product(torch.bfloat16, torch.device("cpu"), kernels.chosen())(weight, None)(x)
print(y.tolist())
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_the_environment_forces_a_path_and_else_it_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    fastest = kernels.chosen()
    assert fastest is not None and fastest.name == kernels.available()[0]
    for name in kernels.available():
        monkeypatch.setenv(kernels.VARIABLE, name)
        forced = kernels.chosen()
        assert forced is not None and forced.name == name
    monkeypatch.setenv(kernels.VARIABLE, "off")
    assert kernels.chosen() is None


def test_a_path_that_is_unknown_or_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "sse9")
    with pytest.raises(ConfigError, match=r"'sse9'.*avx512vnni, avx512, avxvnni, avx2, portable, off"):
        kernels.chosen()
    native = kernels._load_native()
    assert native is not None
    only = SimpleNamespace(paths=lambda: native.paths()[-1:], FP32=0, BF16=1, FP16=2, SILU=0, GELU_TANH=1)
    monkeypatch.setattr(kernels, "_load_native", lambda: only)
    assert kernels.available() == ("portable",) and kernels.load("portable").name == "portable"
    for name in kernels.INSTRUCTION_SETS[:-1]:
        with pytest.raises(ConfigError, match=f"cannot run {name} kernels.*portable, off"):
            kernels.load(name)


def test_without_the_extension_torch_computes_and_it_is_said_once() -> None:
    done = python(BLOCKED + PRODUCT)
    assert done.returncode == 0 and done.stdout.strip() == "[[3.0, 3.0]]"
    assert done.stderr.count("KvineWarning") == 1 and "C++17 compiler" in done.stderr
    assert not python(BLOCKED + PRODUCT, KVINE_KERNELS="off").stderr
    refused = python(BLOCKED + PRODUCT, KVINE_KERNELS="portable")
    assert "ConfigError: portable kernels were asked for" in refused.stderr


def test_the_command_line_says_it_in_one_line_on_stderr() -> None:
    command = "from kvine.cli.app import app, main; from kvine import kernels\n"
    command += "app.command()(lambda: print(kernels.chosen()) or None)\n"
    done = python(BLOCKED + "sys.argv[1:] = ['<lambda>']\n" + command + "main()")
    assert done.stdout.strip() == "None", done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("Note: Kvine runs without its compiled kernels")


def test_a_new_process_is_forced_too_and_has_one_openmp_runtime() -> None:
    code = SAY + "\nimport torch\nk.bind(torch.ones(4, 8))(torch.ones(1, 8))\n"
    code += "print({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line or 'libomp' in line})"
    forced, runtimes = python(code, KVINE_KERNELS="portable").stdout.splitlines()
    assert forced == "portable"
    assert runtimes.count(",") == 0 and "omp" in runtimes
