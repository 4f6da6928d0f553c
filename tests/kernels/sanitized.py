"""Runs the kernels' tests on an extension built elsewhere: `python tests/kernels/sanitized.py FOLDER [ARGUMENTS]`."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch  # before the extension, as `kvine.kernels` does it

TESTS = Path(__file__).parent


def main(folder: str, *arguments: str) -> int:
    """Exit code of pytest, which also gets `arguments`."""
    [built] = Path(folder).glob("_native*.so")
    spec = importlib.util.spec_from_file_location("kvine.kernels._native", built)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[spec.name] = module
    print(f"The tests run on {built}, with {torch.get_num_threads()} threads.")
    engine = TESTS.parent / "engine"
    files = [*sorted(TESTS.glob("test_*_kernels.py")), engine / "test_fused.py", engine / "test_packed_cache.py"]
    return pytest.main(["-q", "-p", "no:cacheprovider", *map(str, files), *arguments])


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
