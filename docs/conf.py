"""The documentation site: `make docs` builds it from these pages, README.md and the docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import rotoff

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"(?<!!)\[([^\]]*)\]\(\.\./([^)]*)\)")  # links to files of the repository that are no pages
GROUPS = {
    "Training": ("Checkpointable", "attach", "detach", "attach_schedule", "RotoffConfig")
    + ("selective_policy", "SelectivePolicy"),
    "Asking before training": (
        "plan",
        "audit",
        "PlannedSteps",
        "PlannedStep",
        "largest",
        "Largest",
        "estimate",
        "stages",
    )
    + ("PlannedMesh", "PlannedPipeline", "PlannedRank", "Device", "devices", "register_device"),
    "Planning": ("solve", "sweep", "Sweep", "Row", "keep_all", "min_mem_limit", "lower_bound", "simulate", "Machine"),
    "Chains and plans": ("Chain", "Stage", "Form", "ParameterGroup", "Sequence", "Op", "OpKind", "Value", "parse")
    + ("Trace", "parse_bytes", "format_bytes"),
    "Showing": ("render", "chrome_trace", "save_chrome_trace"),
}
MODULES = ("rotoff.plot", "rotoff.integrations.transformers", "rotoff.integrations.lightning")

project, author, release = "rotoff", "the rotoff authors", rotoff.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"rotoff {release}"
default_role = "code"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
myst_links_external_new_tab = True
nb_execution_mode = "auto"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
autodoc_mock_imports = ["transformers", "lightning"]  # only their names are needed
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them
autodoc_default_options = {"members": True, "inherited-members": "Module,tuple,dict,Callback,TrainerCallback"}


def reference() -> str:
    """The page of all public names, in groups; fails where one is in none."""
    named = [name for names in GROUPS.values() for name in names]
    errors = [n for n in dir(rotoff) if isinstance(v := getattr(rotoff, n), type) and issubclass(v, Exception)]
    missing = {n for n in dir(rotoff) if not n.startswith("_") and callable(getattr(rotoff, n))} - {*named, *errors}
    if missing:
        raise ValueError(f"docs/conf.py: GROUPS names no place for {', '.join(sorted(missing))}")
    lines = [
        "# Reference",
        "",
        "Every public name. Units are in the names: `saved_bytes`, `forward_time` in seconds.",
        "",
    ]
    for title, names in {**GROUPS, "Errors": errors}.items():
        lines += [f"## {title}", ""]
        for name in names:
            kind = "class" if isinstance(getattr(rotoff, name, None), type) else "function"
            lines += ["```{eval-rst}", f".. auto{kind}:: rotoff.{name}", "```", ""]
    for module in MODULES:
        lines += [f"## {module}", "", "```{eval-rst}", f".. automodule:: {module}"]
        lines += ["   :imported-members:" if module == "rotoff.plot" else "", "```", ""]
    return "\n".join(lines)


def fields_as_lists(_app: Any, _what: str, _name: str, _it: Any, _options: Any, lines: list[str]) -> None:
    """Lines such as ``mem_limit: bytes that ...`` of a docstring become a list."""
    made: list[str] = []
    inside = False
    for line in lines:
        field = re.match(r"^([\w]+(?:, [\w]+)*): (.+)", line)
        if field:
            made += ([] if inside else [""]) + [f"* ``{field[1]}``: {field[2]}"]
        elif inside and line and not line.startswith(" "):
            made += ["", line]
        else:
            made.append("  " + line.strip() if inside and line else line)
        inside = bool(field) or (inside and line.startswith(" "))
    lines[:] = made


def setup(app: Any) -> None:
    def read(_app: Any, page: str, source: list[str]) -> None:
        if page == "reference":
            source[0] = reference()
        elif page == "index":  # README, whose links are those of the repository
            readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
            source[0] = re.sub(r"\[(\w+)\]\([A-Z]+\.md\)", r"\1", readme) + source[0]
        elif not page.endswith("tour"):
            source[0] = OUTSIDE.sub(r"\1 (`\2`)", source[0])

    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", fields_as_lists, priority=1)
