"""The README's quick start: train a model in fewer bytes than it takes, and see what that costs."""

import torch
from torch import nn

import rotoff


def block():
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))


model = nn.Sequential(*[block() for _ in range(8)])
x, y = torch.randn(1024, 512), torch.randn(1024, 512)

model = rotoff.Checkpointable(model).measure(x)
model.compute_sequence("60 MiB")
peak, everything = model.get_expected_memory(), model.keep_all_memory
print("peak", rotoff.format_bytes(peak), "of", rotoff.format_bytes(everything))
seconds, plain = model.get_expected_makespan(), model.profile.chain.compute_time
print(f"step {seconds:.3f} s, keeping everything {plain:.3f} s")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
