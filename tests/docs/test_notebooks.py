"""The notebooks run from top to bottom in this environment's own Python, and are stored without output."""

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from doc_pages import ROOT, title
from jupyter_client import KernelManager
from nbclient import NotebookClient

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
SHARE = "import doc_runs\ndoc_runs.shared = doc_runs.weights_read_once()\ndoc_runs.shared.__enter__()"
EMPTY = "%reset -f"  # the namespace; what has been imported and loaded stays


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    """One kernel for all notebooks, since torch takes seconds to import and a model as long to load."""
    folder = tmp_path_factory.mktemp("kernel")
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):  # not the user's own kernels
            patch.setenv(variable, str(folder / variable))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        manager = KernelManager(kernel_name="python3")
        manager.start_kernel(cwd=str(folder))
        run([nbformat.v4.new_code_cell(SHARE)], manager)
        yield manager
        manager.shutdown_kernel(now=True)


def run(cells: list[nbformat.NotebookNode], kernel: KernelManager) -> None:
    NotebookClient(nbformat.v4.new_notebook(cells=cells), km=kernel, timeout=120).execute()


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=title)
def test_it_runs(path: Path, kernel: KernelManager) -> None:
    run([nbformat.v4.new_code_cell(EMPTY), *nbformat.read(path, as_version=4).cells], kernel)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=title)
def test_it_is_stored_without_output(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
