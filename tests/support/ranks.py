"""Groups of processes, forked from one that has imported all that they need: a process alone takes seconds to do so.

    python tests/support/ranks.py "2 pipeline_steps gpipe" ...

runs `main("gpipe")` of the module `pipeline_steps` in a group of two, then the next case, and prints what they print
under a heading for each.
"""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

HEADING = "== "


@cache
def printed(*cases: str) -> dict[str, list[str]]:
    """The lines of each case; a rank that fails or waits forever ends them all."""
    import rotoff

    support, found = Path(__file__).parent, dict[str, list[str]]()
    paths = [str(path) for path in (Path(rotoff.__file__).parent.parent, support, support.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for line in done.stdout.splitlines():
        if line.startswith(HEADING):
            lines = found[line.removeprefix(HEADING)] = []
        else:
            lines.append(line)
    return found


def say(text: str) -> None:
    """Print a line by one write, which the lines of other processes cannot come into."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def by_first(text: str) -> None:
    """Print a line in the first process alone."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        say(text)


def everyone(mine: Any) -> list[Any]:
    """What each process of the group has for `mine`."""
    import torch.distributed as dist

    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def fork(ranks: int, main: Callable[[], object]) -> bool:
    """Run `main` in so many processes of a group; returns whether all ended well."""
    import torch.distributed as dist

    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            if child := os.fork():
                children.append(child)
                continue
            code = 1
            try:
                store = f"file://{folder}/store"
                dist.init_process_group("gloo", store, timedelta(seconds=30), world_size=ranks, rank=rank)
                main()
                dist.destroy_process_group()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        codes = [os.waitpid(child, 0)[1] for child in children]
        return not any(codes)


if __name__ == "__main__":
    if "STANDIN" in os.environ:
        sys.path.append(str(Path(__file__).parents[1] / "cuda_standin"))
        importlib.import_module("standin")  # before torch
    import torch
    import torch._dynamo

    import rotoff.checkpointable  # noqa: F401
    from rotoff.runtime.links import bandwidth
    from rotoff.solver import anneal

    torch.set_num_threads(1)
    gc.freeze()  # so that no process collects, and copies, what was imported
    anneal.DEFAULT_SECONDS, bandwidth.WORK_BYTES = 0.01, bandwidth.WORK_BYTES >> 8  # to fit is enough
    for case in sys.argv[1:]:
        count, module, *arguments = case.split()
        say(f"{HEADING}{case}")
        if not fork(int(count), partial(importlib.import_module(module).main, *arguments)):
            sys.exit(f"in {case}")
