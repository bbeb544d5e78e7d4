"""A language model of Hugging Face's transformers, trained by its own Trainer inside a limit: one argument more.

    python examples/train_transformer.py --limit 0.5
    python examples/train_transformer.py --layers 12 --width 768 --context 512 --limit "2 GiB"

The model is built from its configuration, with no weights to fetch, and learns the characters of Python's own source.
The same steps are trained by the plain Trainer and with rotoff's callback, and the losses are compared. Needs
rotoff[transformers].
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import rotoff
from rotoff.integrations.transformers import RotoffCallback


class Text(torch.utils.data.Dataset):
    """Pieces of a few modules of the standard library, a byte for a token."""

    def __init__(self, context: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:20]
        text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
        tokens = torch.tensor(list(text.encode("ascii", errors="replace")))
        self.pieces = tokens[: len(tokens) // context * context].view(-1, context)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[n], "labels": self.pieces[n]}


def build(options: argparse.Namespace) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {
        "n_layer": options.layers,
        "n_embd": options.width,
        "n_head": options.heads,
        "n_positions": options.context,
    }
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, bos_token_id=0, eos_token_id=0, **sizes))


def train(options: argparse.Namespace, text: Text, *callbacks: RotoffCallback) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            max_steps=options.steps,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(build(options), arguments, train_dataset=text, callbacks=list(callbacks))
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", default="0.5", help="bytes of a step, or a share of what keeping everything takes")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    text = Text(options.context)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sample = {"input_ids": text.pieces[: options.batch].to(device), "labels": text.pieces[: options.batch].to(device)}
    print("measuring the model", flush=True)
    everything = rotoff.Checkpointable(build(options).to(device)).measure(**sample).keep_all_memory
    is_share = options.limit.replace(".", "", 1).isdigit() and float(options.limit) <= 1
    limit = int(float(options.limit) * everything) if is_share else rotoff.parse_bytes(options.limit)

    print(
        f"keeping everything takes {rotoff.format_bytes(everything)}; training {options.steps} plain steps", flush=True
    )
    expected = train(options, text)
    print(f"training {options.steps} steps within {rotoff.format_bytes(limit)}, the first one is planned", flush=True)
    callback = RotoffCallback(limit)
    losses = train(options, text, callback)
    assert callback.planned is not None
    callback.planned.display()
    peak = rotoff.format_bytes(callback.planned.get_expected_memory())
    print(f"\na step keeps {rotoff.format_bytes(everything)} where nothing is planned, {peak} inside the limit")
    for plain, limited in zip(expected, losses, strict=True):
        print(f"loss {plain:.6f} plain, {limited:.6f} limited")
    print("largest difference of any loss:", max(abs(a - b) for a, b in zip(expected, losses, strict=True)))


if __name__ == "__main__":
    main()
