"""One module knows which types of devices there are: nothing else asks whether a device is CUDA, or uses its module."""

from __future__ import annotations

import ast
from pathlib import Path

import rotoff
from rotoff.accelerator import ACCELERATORS

ROOT = Path(rotoff.__file__).parent
# The module itself, and the checks of `rotoff doctor`, which say more about CUDA than a step needs.
BESIDE = {"accelerator.py", "tools/doctor"}


def named(source: str) -> list[int]:
    """The lines that name an accelerator as a string of its own, or torch's module of it."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Constant) and node.value in ACCELERATORS)
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in {f"torch.{kind}" for kind in ACCELERATORS})
        or (isinstance(node, ast.ImportFrom) and node.module in {f"torch.{kind}" for kind in ACCELERATORS})
    ]


def test_no_other_module_names_a_type_of_accelerator() -> None:
    files = {path.relative_to(ROOT): path for path in sorted(ROOT.rglob("*.py"))}
    theirs = {name: path for name, path in files.items() if not {str(name), *map(str, name.parents)} & BESIDE}
    assert len(theirs) > 100
    found = {str(name): named(path.read_text(encoding="utf-8")) for name, path in theirs.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}
