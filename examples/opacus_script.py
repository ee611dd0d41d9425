"""A script written for Opacus: a small classifier, trained privately. Only its import differs."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unison import PrivacyEngine  # was: from opacus import PrivacyEngine

# Images of 28 x 28 in ten classes, made up: a pattern for each class, and noise.
torch.manual_seed(0)
patterns = torch.randn(10, 1, 28, 28)
labels = torch.randint(0, 10, (4096,))
images = patterns[labels] + 6.0 * torch.randn(4096, 1, 28, 28)
train_loader = DataLoader(TensorDataset(images, labels), batch_size=256, shuffle=True)

model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()

privacy_engine = PrivacyEngine()
model, optimizer, train_loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    noise_multiplier=1.1,
    max_grad_norm=1.0,
)

for epoch in range(3):
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss of the last batch {loss.item():.3f}")

model.eval()
with torch.no_grad():
    accuracy = (model(images).argmax(1) == labels).float().mean()
epsilon = privacy_engine.get_epsilon(delta=1e-5)
print(f"accuracy {accuracy:.3f} at ε = {epsilon:.2f}, δ = 1e-5")
