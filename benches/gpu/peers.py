"""How long PyTorch's tools take to find a batch size that fits, on models equal to those of the bench `gpu`.

Lightning's `BatchSizeFinder` (through `Tuner.scale_batch_size`) and Accelerate's `find_executable_batch_size` try sizes
until memory runs out. Each runs in a process of its own, within a share of the card that the allocator is held to.
On a CPU (`--device cpu`) nothing runs out: sizes above a limit raise what PyTorch raises on a card.

The last line is for scripts: for each tool and model the batch that it found, the seconds, and how many sizes it tried.
"""

import argparse
import json
import subprocess
import sys
import time

VOCABULARY, TOKENS = 8192, 256
# On a CPU: more items than these are said not to fit.
PRETENDED_LIMIT = 24


def build(model):
    """The module, and a function from a number of items to a batch on the host."""
    import torch
    from torch import nn

    if model == "cnn":
        module = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25),
            nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 10),
        )
        def batch(items):
            return torch.zeros(items, 1, 28, 28), torch.zeros(items, dtype=torch.long)
        return module, batch

    layers, width = (1, 64) if model == "tiny" else (12, 768)

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, width)
            self.positions = nn.Embedding(TOKENS, width)
            layer = nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCABULARY, bias=False)

        def forward(self, text):
            length = text.shape[1]
            mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
            x = self.tokens(text) + self.positions(torch.arange(length, device=text.device))
            return self.head(self.norm(self.blocks(x, mask=mask))).flatten(0, 1)

    def batch(items):
        text = torch.zeros(items, TOKENS, dtype=torch.long)
        return text, text
    return Gpt(), batch


def check(device, items):
    """Raises what a full card raises, where there is no card."""
    import torch

    if device == "cpu" and items > PRETENDED_LIMIT:
        raise torch.OutOfMemoryError("CUDA out of memory. (pretended)")


def hold(options):
    """Holds the allocator to a share of the card, and starts the device."""
    import torch

    if options.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        share = min(1.0, options.memory_gib * 2**30 / total)
        torch.cuda.set_per_process_memory_fraction(share, 0)
        torch.zeros(1, device="cuda")


def with_accelerate(options):
    import torch
    from accelerate.utils import find_executable_batch_size
    from torch.nn.functional import cross_entropy

    tried = []

    @find_executable_batch_size(starting_batch_size=options.start)
    def train(batch_size):
        tried.append(batch_size)
        check(options.device, batch_size)
        module, batch = build(options.model)
        module.to(options.device)
        optimizer = torch.optim.Adam(module.parameters(), 1e-4)
        for _ in range(2):
            inputs, targets = (part.to(options.device) for part in batch(batch_size))
            cross_entropy(module(inputs), targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        if options.device == "cuda":
            torch.cuda.synchronize()
        return batch_size

    return train(), tried


def with_lightning(options):
    import torch
    from torch.nn.functional import cross_entropy
    try:
        import lightning.pytorch as pl
        from lightning.pytorch.tuner import Tuner
    except ImportError:
        import pytorch_lightning as pl
        from pytorch_lightning.tuner import Tuner

    tried = []
    module, batch = build(options.model)

    class Task(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.module, self.batch_size = module, 2

        def training_step(self, parts, _):
            inputs, targets = parts
            if not tried or tried[-1] != len(inputs):
                tried.append(len(inputs))
            check(options.device, len(inputs))
            return cross_entropy(self.module(inputs), targets.flatten())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-4)

        def train_dataloader(self):
            data = torch.utils.data.TensorDataset(*batch(options.items))
            return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

    task = Task()
    trainer = pl.Trainer(
        accelerator="gpu" if options.device == "cuda" else "cpu", devices=1, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    # `binsearch` doubles until memory runs out and halves the range from there.
    found = Tuner(trainer).scale_batch_size(
        task, mode="binsearch", init_val=2, max_trials=40, steps_per_trial=2
    )
    return found, tried


def one(options):
    """Runs one tool in this process and prints what it found."""
    hold(options)
    tool = {"accelerate": with_accelerate, "lightning": with_lightning}[options.tool]
    started = time.perf_counter()
    found, tried = tool(options)
    print("found: " + json.dumps({"batch": found, "seconds": time.perf_counter() - started, "tried": tried}))


def every(options):
    """Runs each tool on each model in a process of its own."""
    result = f"result: bench=peers target={options.device} memory_gib={options.memory_gib:g}"
    failed = False
    for model in options.model.split(","):
        for tool in ("lightning", "accelerate"):
            command = [sys.executable, __file__, "--tool", tool, "--model", model, "--device", options.device,
                       "--memory-gib", str(options.memory_gib)]
            try:
                run = subprocess.run(command, capture_output=True, text=True, timeout=options.limit)
            except subprocess.TimeoutExpired:
                print(f"{tool} on {model}: stopped after {options.limit} s")
                continue
            line = next((line for line in run.stdout.splitlines() if line.startswith("found: ")), None)
            if line is None:
                failed = True
                print(f"{tool} on {model}: exit {run.returncode}; {run.stderr.strip()[-500:]}")
                continue
            found = json.loads(line[len("found: "):])
            print(f"{tool} on {model}: batch {found['batch']} in {found['seconds']:.1f} s, tried {found['tried']}")
            key = f"{tool}_{model}"
            result += f" {key}={found['batch']} {key}_seconds={found['seconds']:.1f} {key}_tried={len(found['tried'])}"
    print(result)
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", default="cnn,gpt", help="cnn, gpt or tiny; several with commas")
    parser.add_argument("--memory-gib", type=float, default=8.0, help="what the allocator may take, in GiB")
    parser.add_argument("--limit", type=float, default=120, help="the most seconds for one tool on one model")
    parser.add_argument("--tool", choices=["lightning", "accelerate"], help="one tool, in this process")
    options = parser.parse_args()
    # Where Accelerate starts going down, and how many items Lightning's loader has: above what fits on any card of
    # today within the memory that is allowed.
    small = options.device == "cpu"
    options.start = 64 if small else {"cnn": 16384}.get(options.model, 256)
    options.items = 128 if small else {"cnn": 65536}.get(options.model, 1024)
    if options.tool:
        one(options)
        return 0
    return every(options)


if __name__ == "__main__":
    sys.exit(main())
