"""What a language model's plan gains where its backward is known to start from the loss alone (`backward_from`), as a
table.

    python benchmarks/backward_from.py [--words 8000] [--json FILE]

A LLaMA of 6 layers of width 256 on 4 x 256 tokens, on the CPU. Beside the plain model's peak: what keeping everything
is predicted to take, the smallest limit of mode joint, and expected and measured peaks at 80 % of the plain one. Needs
the extra ``gallery``; a minute or two.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests" / "support")]

import torchvision_operators  # noqa: E402
from allocated import peak_bytes  # noqa: E402

import rotoff  # noqa: E402

BATCH, TOKENS, SHARE = 4, 256, 0.8


def compare(words: int) -> dict[str, Any]:
    """Bytes, with every output's gradient charged ("any") and with the loss's alone ("loss")."""
    torchvision_operators.declare()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    sizes = {"vocab_size": words, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    batch = {"input_ids": torch.randint(0, words, (BATCH, TOKENS)), "use_cache": False}
    batch["labels"] = batch["input_ids"]

    def step(of: Any) -> None:
        output = of(**batch)  # held meanwhile, as most loops hold it
        output.loss.backward()

    step(model)  # gradients to add to
    found: dict[str, Any] = {
        "words": words,
        "logits": BATCH * TOKENS * words * 4,
        "plain": peak_bytes(lambda: step(model)),
    }
    for name, starts in (("any", None), ("loss", "loss")):
        planned = rotoff.Checkpointable(model, backward_from=starts).measure(**batch)
        limit = int(SHARE * found["plain"])
        planned.compute_sequence(limit)
        found[name] = {
            "keep_all": planned.keep_all_memory,
            "least": planned.min_mem_limit(),
            "limit": limit,
            "expected": planned.get_expected_memory(),
            "measured": peak_bytes(lambda planned=planned: step(planned)),
        }
        planned.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, nargs="+", default=[2000, 8000], help="sizes of the vocabulary")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler's start and stop are no news
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = [compare(words) for words in options.words]
    print(
        f"{'words':>7s} {'logits':>7s} {'plain':>7s}  {'gradients':9s} {'keep all':>8s} {'least':>7s} {'expected':>8s}"
        f" {'measured':>8s}  (MiB)"
    )
    for row in rows:
        for name in ("any", "loss"):
            head = (row["words"], row["logits"] / 2**20, row["plain"] / 2**20)
            r = {key: nbytes / 2**20 for key, nbytes in row[name].items()}
            print(
                f"{head[0]:7d} {head[1]:7.1f} {head[2]:7.1f}  {name:9s} {r['keep_all']:8.1f} {r['least']:7.1f}"
                f" {r['expected']:8.1f} {r['measured']:8.1f}"
            )
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
