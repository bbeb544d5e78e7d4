"""Carries out tests/SWAP.md: deletes the files and the tests that its table names, and helpers that nothing uses then.
A working paper, which goes with the table: ``python tests/swap.py``."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def rows() -> dict[str, list[str]]:
    """Per file the names to delete; ["*"] for all of it."""
    found = {}
    for line in (TESTS / "SWAP.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4 and cells[1] in ("delete", "partly"):
            found[cells[0].strip("`")] = ["*"] if cells[1] == "delete" else re.findall(r"`(\w+)`", cells[2])
    return found


def without(source: str, names: set[str]) -> str:
    lines = source.split("\n")
    for node in reversed(ast.parse(source).body):
        if name_of(node) in names:
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
            del lines[first - 1 : node.end_lineno]
    return "\n".join(lines)


def name_of(node: ast.stmt) -> str | None:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def unused(source: str) -> set[str]:
    """Helpers of a file of tests that nothing in it reads."""
    found = set()
    for node in ast.parse(source).body:
        name = name_of(node)
        marks = [ast.unparse(one) for one in getattr(node, "decorator_list", [])]
        if (
            name is None
            or name.lower().startswith("test")
            or name == "pytestmark"
            or any("autouse" in m for m in marks)
        ):
            continue
        if len(re.findall(rf"\b{name}\b", source)) == len(re.findall(rf"\b{name}\b", ast.unparse(node))):
            found.add(name)
    return found


def main() -> None:
    changed = []
    for name, tests in rows().items():
        path = TESTS / name
        if tests == ["*"]:
            path.unlink()
            continue
        source = without(path.read_text(), set(tests))
        while gone := unused(source):
            source = without(source, gone)
        if "def test" not in source and "class Test" not in source:
            path.unlink()
            continue
        path.write_text(source)
        changed.append(str(path))
    for options in (["check", "--quiet", "--fix", "--select", "F401,I001"], ["format", "--quiet"]):
        subprocess.run([sys.executable, "-m", "ruff", *options, *changed], check=False)


if __name__ == "__main__":
    main()
