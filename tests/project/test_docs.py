"""What README and docs/ show is run: Python blocks in order, `rotoff` commands too; every link inside leads
somewhere."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import rotoff
from rotoff.cli import main
from rotoff.solver import anneal

pytestmark = pytest.mark.full_search

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted((ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = ("python", "sh")
NAMED_FILE = re.compile(r"(?<![\w./~-])((?:[\w.-]+/)+[\w.-]+\.(?:py|pyx|sh|md|json|csv|png|svg|toml))\b")
NAMED_FOLDER = re.compile(r"`((?:[\w.-]+/)+)`")
NAMED_TEST = re.compile(r"`(test_\w+)(?:\[[^`\]]*\])?(?:::(test_\w+)(\*?))?")


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(language, what follows it, content) of every fenced block."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def runnable(page: Path) -> list[tuple[str, str, str]]:
    """Blocks that are run: ``python`` and ``sh``, the program that each is a part of, and its code."""
    found = [(language, marks.strip(), code) for language, marks, code in blocks(page)]
    return [(language, marks.removeprefix("in: "), code) for language, marks, code in found if language in RUN]


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: page.name)
@pytest.mark.grid(every=6)
def test_what_a_page_shows_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    from shown_in_docs import PROGRAMS

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(anneal, "DEFAULT_SECONDS", 0.05)  # what is shown must run, not find the best
    monkeypatch.syspath_prepend(str(tmp_path))
    # The chain that pages speak of where none was measured: eight stages of a GiB each.
    stage = rotoff.Stage("block", 0.1, 0.2, 2**28, 3 * 2**30)
    rotoff.Chain((stage,) * 8, 12e9, 12e9, input_bytes=2**20, name="example").save("chain.json")
    names: dict[str, Any] = {"__name__": page.stem}
    for language, program, code in runnable(page):
        if language == "python":
            torch.manual_seed(0)
            compiled = compile(code, f"{page.name}: {code.splitlines()[0]}", "exec")
            with ExitStack() as around:
                if program:
                    names["rotoff"] = rotoff
                    try:
                        around.enter_context(PROGRAMS[program](tmp_path, names))
                    except pytest.skip.Exception:  # its library is not installed
                        continue
                exec(compiled, names)
        else:
            for line in code.replace("\\\n", " ").splitlines():
                if line.startswith("rotoff "):
                    assert main(shlex.split(line, comments=True)[1:]) == 0, line
    sys.modules.pop("my_models", None)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def missing_paths(page: Path) -> list[str]:
    """What the text calls a file or folder of this repository, and is none; folders may be named from inside the
    package."""
    files, folders = (set(pattern.findall(prose(page))) for pattern in (NAMED_FILE, NAMED_FOLDER))
    found = {path for path in files if any((top / path).exists() for top in (ROOT, page.parent))}
    found |= {path for path in folders if any((ROOT / top / path).is_dir() for top in (".", "rotoff"))}
    return sorted((files | folders) - found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert missing_paths(page) == []


def test_tests_that_a_page_names_exist() -> None:
    sources = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    named = {found for page in PAGES for found in NAMED_TEST.findall(prose(page))}
    assert len(named) > 30
    for module, function, star in named:
        assert module in sources, module
        if function:
            assert f"def {function}{'' if star else '('}" in sources[module], f"{module}::{function}"


def test_code_is_at_most_88_characters_wide() -> None:
    """Wider code is cut off, or scrolls, on the site and on GitHub."""
    shown = {page.name: [code for language, _, code in blocks(page) if language in RUN] for page in PAGES}
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    shown["tour.ipynb"] = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for name, codes in shown.items():
        for line in "\n".join(codes).splitlines():
            assert len(line) <= 88, f"{name}: {line}"


def test_every_public_name_says_what_it_is() -> None:
    pytest.importorskip("torch")
    for name in dir(rotoff):
        value = getattr(rotoff, name)
        if name.startswith("_") or name in ("annotations", "TYPE_CHECKING", "Any") or not callable(value):
            continue
        assert value.__doc__, name
        if isinstance(value, type) and value.__module__.startswith("rotoff"):
            for method, function in vars(value).items():
                if not method.startswith("_") and callable(function) and not isinstance(function, type):
                    assert function.__doc__, f"{name}.{method}"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(anneal, "DEFAULT_SECONDS", 0.05)
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)  # the site runs it
    names: dict[str, Any] = {"__name__": "tour"}
    pictures = []
    for n, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            *most, last = ast.parse("".join(cell["source"])).body
            shows = isinstance(last, ast.Expr)  # a notebook shows the value of a cell's last line
            exec(compile(ast.Module([*most, *([] if shows else [last])], []), f"cell {n}", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), f"cell {n}", "eval"), names)
                pictures += [value._repr_png_()] if value is not None else []
    assert [picture[:4] for picture in pictures] == [b"\x89PNG"] * 2
    assert names["plain"] == names["planned"]
    assert names["model"].get_expected_memory() <= names["everything"] // 2
    assert "plain PyTorch takes" in capsys.readouterr().out


def test_the_reference_has_a_place_for_every_public_name() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "conf.py"))["reference"]()  # raises where it has none
    assert ".. autofunction:: rotoff.attach_schedule" in page
