"""The package as installed: version, marker files, public names, and that the tests see the wheel."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import rotoff
from rotoff import _dp

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif("ROTOFF_TEST_INSTALLED" not in os.environ, reason="only `make test` promises an installed wheel")
def test_the_tests_run_against_the_installed_wheel() -> None:
    for module in (rotoff, _dp):
        path = Path(module.__file__).resolve()
        assert path.is_relative_to(Path(sys.prefix).resolve())
        assert "site-packages" in path.parts
    assert importlib.metadata.version("rotoff") == rotoff.__version__
    assert not _dp.__file__.endswith(".py")
    assert (Path(rotoff.__file__).parent / "py.typed").exists()


def test_a_star_import_gives_the_public_names_and_no_others() -> None:
    pytest.importorskip("torch")
    names: dict[str, Any] = {}
    exec("from rotoff import *", names)
    assert set(names) - {"__builtins__", "__version__"} == {name for name in dir(rotoff) if is_public(name)}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'solv'"):
        rotoff.solv  # noqa: B018 - reading it is the test


def python(code: str, folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """`code` in a new process that finds rotoff in `path` alone."""
    told = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=told, check=False
    )


SOURCE = Path(rotoff.__file__).parent


def test_importing_rotoff_loads_neither_torch_nor_numpy_and_has_its_folders(tmp_path: Path) -> None:
    code = "import sys, rotoff; print(sorted({'torch', 'numpy', 'matplotlib', 'rotoff.solver'} & set(sys.modules)))"
    code += "; rotoff.solver.policies.POLICIES, rotoff.core.simulator, rotoff.errors.RotoffError"
    ran = python(code, tmp_path, SOURCE.parent)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


def test_a_source_tree_that_is_not_compiled_says_what_to_do(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "rotoff", ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    ran = python("import rotoff; rotoff.solve", tmp_path, tmp_path)
    command = python("import sys; from rotoff.cli import main; sys.exit(main(['--help']))", tmp_path, tmp_path)
    assert (ran.returncode, command.returncode) == (1, 2)
    said = ran.stderr.splitlines()[-1]
    assert f"is not compiled in {tmp_path / 'rotoff'}" in said
    assert "build_ext --inplace" in said
    assert command.stderr == f"rotoff: {said.partition(': ')[2]}\n"


@pytest.mark.parametrize("command", ["profile", "plan", "largest"])
def test_commands_that_need_torch_say_so(command: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules['torch'] = None; from rotoff.cli import main; sys.exit(main(['{command}', 'a:b']))"
    ran = python(code, tmp_path, SOURCE.parent)
    assert ran.returncode == 2
    assert ran.stderr == f"rotoff {command}: this command runs a model and needs torch: pip install torch\n"


@pytest.mark.slow
def test_a_wheel_installs_and_plans_where_there_is_no_compiler(tmp_path: Path) -> None:
    """From the sdist, as users get it: for all Pythons from 3.11 on, audited as manylinux, 2.17 or later."""
    command = ["bash", str(ROOT / "scripts" / "wheels.sh"), sys.executable]
    told = {**os.environ, "PYTHON": sys.executable, "DIST": str(tmp_path)}
    run = subprocess.run(command, env=told, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "joint    step" in run.stdout  # planned in an environment with nothing else on PATH
    (wheel,) = tmp_path.glob("*.whl")
    tag = "cp311-abi3" if sys.version_info >= (3, 11) else "cp310-cp310"
    assert f"-{tag}-manylinux" in wheel.name
    assert not {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".c", ".pyc"))}
    assert len(list(tmp_path.glob("*.tar.gz"))) == 1


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


# -- the public names and their arguments are those of ``public_api.txt``: whoever changes one changes that file, and means it


pytest.importorskip("torch")


LISTED = Path(__file__).with_name("public_api.txt")


def is_public(name: str) -> bool:
    """Whether it is no folder or file of the package, and not private."""
    return not name.startswith("_") and not inspect.ismodule(getattr(rotoff, name))


def arguments(thing: Any) -> str:
    try:
        return ", ".join(
            f"{p.name}" + ("" if p.default is p.empty else f"={p.default!r}")
            for p in inspect.signature(thing).parameters.values()
        )
    except (TypeError, ValueError):
        return ""


def described() -> list[str]:
    """Every public name with its arguments, and those of the methods of classes."""
    found = []
    for name in filter(is_public, dir(rotoff)):
        thing = getattr(rotoff, name)
        found.append(f"{name}({arguments(thing)})" if callable(thing) else name)
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            for method, function in sorted(vars(thing).items()):
                if not method.startswith("_") and (
                    callable(function) or isinstance(function, (classmethod, staticmethod))
                ):
                    found.append(f"{name}.{method}({arguments(getattr(thing, method))})")
    return found


def test_public_names_and_arguments_are_those_listed() -> None:
    assert described() == LISTED.read_text(encoding="utf-8").splitlines()
