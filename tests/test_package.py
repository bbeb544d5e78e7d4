"""The package as installed: version, marker files, public names, and that the tests see the wheel."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import rotoff
from rotoff import _dp

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif("ROTOFF_TEST_INSTALLED" not in os.environ, reason="only `make test` promises an installed wheel")
def test_the_tests_run_against_the_installed_wheel() -> None:
    for module in (rotoff, _dp):
        path = Path(module.__file__).resolve()
        assert path.is_relative_to(Path(sys.prefix).resolve())
        assert "site-packages" in path.parts
    assert importlib.metadata.version("rotoff") == rotoff.__version__


def test_the_kernel_is_compiled() -> None:
    assert not _dp.__file__.endswith(".py")


def test_the_type_marker_is_packaged() -> None:
    assert (Path(rotoff.__file__).parent / "py.typed").exists()


def test_every_public_name_can_be_had() -> None:
    pytest.importorskip("torch")
    for name in dir(rotoff):
        getattr(rotoff, name)
    assert "Checkpointable" in dir(rotoff)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'solv'"):
        rotoff.solv  # noqa: B018 - reading it is the test


def test_the_changelog_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[(Unreleased|{re.escape(rotoff.__version__)})\]", text, re.MULTILINE)


@pytest.mark.slow
def test_pip_install_leaves_a_torch_that_is_there_alone(tmp_path: Path) -> None:
    """`pip install .` into an environment with torch builds, works, and installs no other torch."""
    torch = pytest.importorskip("torch")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    site = next((tmp_path / "env" / "lib").glob("python*")) / "site-packages"
    # The torch of this process, lent to the new environment.
    (site / "lent.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check", str(ROOT)]
    subprocess.run(install, check=True, capture_output=True, env=environment, cwd=tmp_path, timeout=600)
    assert not (site / "torch").exists()
    script = "import torch, rotoff; rotoff.Checkpointable; print(rotoff.__file__); print(torch.__file__)"
    run = subprocess.run(
        [str(python), "-c", script], check=True, capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert run.stdout.split() == [str(site / "rotoff" / "__init__.py"), torch.__file__]
