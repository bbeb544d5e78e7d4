"""Refuses stages that are compiled with CUDA graphs.

A graph keeps its memory for good, and the allocator reports no events for it, so its bytes cannot be measured.
"""

from __future__ import annotations

from typing import Any

from ..errors import MeasureError
from ..tensors.stage import StageModule


def refuse_cuda_graphs(stage: StageModule) -> None:
    """Raise MeasureError if a module of `stage` is compiled with a mode or option that records CUDA graphs."""
    for module in stage.every_module():
        for compiled in (module, getattr(module, "_compiled_call_impl", None)):
            ask: Any = getattr(compiled, "get_compiler_config", None)
            config = ask() if callable(ask) else None
            if isinstance(config, dict) and config.get("triton.cudagraphs"):
                raise MeasureError(
                    f"stage {stage.name!r} is compiled with CUDA graphs, whose memory cannot be measured; compile it"
                    ' with mode="default" or mode="max-autotune-no-cudagraphs" instead of "reduce-overhead" or'
                    ' "max-autotune"'
                )
