"""Whether a tag may be released: `python scripts/check_release.py v0.1.0` looks at the version and the changelog."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def problem(tag: str) -> str | None:
    """What keeps `tag` from being released, as a sentence; None if nothing does."""
    version = runpy.run_path(str(ROOT / "rotoff" / "version.py"))["__version__"]
    if tag != f"v{version}":
        return f"the tag is {tag} and rotoff/version.py says {version}; tag v{version}, or change the version"
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(heading, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE):
        return (
            f"CHANGELOG.md has no heading '## [{version}] - YYYY-MM-DD'; rename [Unreleased] on the day of the release"
        )
    return None


if __name__ == "__main__":
    sys.exit(problem(sys.argv[1] if len(sys.argv) > 1 else ""))
