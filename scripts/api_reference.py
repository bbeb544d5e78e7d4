"""The API reference as HTML, from the docstrings, by pdoc: `make docs`, or

python scripts/api_reference.py docs/api
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from pathlib import Path

import pdoc
import pdoc.render

import rotoff

# Beside the page of public names; the rest of the package is nobody's business but its own.
MODULES = {
    "rotoff.plot": "matplotlib",
    "rotoff.solver.bounds": None,
    "rotoff.solver.policies": None,
    "rotoff.nn": "torch",
    "rotoff.cli": None,
    "rotoff.integrations.transformers": "transformers",
    "rotoff.integrations.lightning": "lightning",
}


def public_names() -> list[str]:
    """What `rotoff` offers: every name that its page imports, without modules and what only its types need."""
    names = (
        name for name in dir(rotoff) if not name.startswith("_") and name not in ("annotations", "TYPE_CHECKING", "Any")
    )
    return sorted(name for name in names if not inspect.ismodule(getattr(rotoff, name)))


def modules() -> list[str]:
    """The modules that import here: without an extra, or where its own imports fail, a page is left out, and it is
    said."""
    found = []
    for name, needs in MODULES.items():
        try:
            importlib.import_module(name)
            found.append(name)
        except Exception as error:
            print(f"{name} is left out ({needs}: {type(error).__name__})", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the pages go")
    directory = parser.parse_args().directory
    rotoff.__all__ = public_names()  # type: ignore[attr-defined]
    for name in public_names():
        setattr(rotoff, name, getattr(rotoff, name))  # those that are loaded on first use
    pdoc.render.configure(docformat="google", show_source=False, footer_text=f"rotoff {rotoff.__version__}")
    pdoc.pdoc("rotoff", r"!rotoff\..*", *modules(), r"!rotoff\.(cli|plot)\..*", output_directory=directory)
    print(f"written to {directory / 'rotoff.html'}")


if __name__ == "__main__":
    main()
