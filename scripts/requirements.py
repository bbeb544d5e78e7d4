"""What rotoff needs of other packages, a line each: with an extra's name, what that extra needs.

    python scripts/requirements.py [EXTRA]

The Makefile installs these while the wheel, which says the same, is built.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with `build`

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def needed(extra: str) -> Iterator[str]:
    """The requirements of one extra, those of the extras that it names included."""
    for requirement in PROJECT["optional-dependencies"][extra]:
        if (extras := re.fullmatch(r"rotoff\[(.*)\]", requirement)) is None:
            yield requirement
        else:
            for name in extras[1].split(","):
                yield from needed(name)


print(*PROJECT["dependencies"], *(line for extra in sys.argv[1:] for line in needed(extra)), sep="\n")
