"""SiamMM's objective in your own training loop: any network, any data, plain PyTorch.

    python examples/own_training_loop.py [epochs]

The mixture is fitted to the embeddings of the last epoch, starting from its previous centroids, so that clusters keep
their numbers. The loss pulls each embedding towards its nearest components. It has no momentum encoder, as in SimSiam.
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import normalize

import siammm
from siammm import losses

BATCH, DIMS, NEAREST, TEMPERATURE = 128, 32, 3, 0.1


class Network(nn.Module):
    """An encoder and a predictor; put yours here."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, DIMS))
        self.predictor = nn.Sequential(nn.Linear(DIMS, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, DIMS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The prediction and the embedding, both of unit length."""
        z = self.encoder(x)
        return normalize(self.predictor(z), dim=1), normalize(z, dim=1)


def view(x: Tensor) -> Tensor:
    """Random augmentation; put yours here."""
    kept = torch.rand_like(x) > 0.25
    return x * kept * (1 + 0.2 * torch.randn(len(x), 1)) + 0.1 * torch.randn_like(x)


def main(arguments: list[str]) -> None:
    torch.manual_seed(0)
    images = torch.tensor(load_digits(return_X_y=True)[0] / 16, dtype=torch.float32)
    network = Network()
    optimiser = torch.optim.AdamW(network.parameters(), lr=2e-3)
    mixture: siammm.VonMisesFisherMixture | None = None
    epochs = int(arguments[0]) if arguments else 20
    for epoch in range(epochs):
        with torch.no_grad():
            bank = network.eval()(images)[1]
        # Early clusters mean little, so merge only in the last epoch.
        merge = "auto" if epoch == epochs - 1 else None
        mixture = siammm.VonMisesFisherMixture(
            60, temperature=TEMPERATURE, merge=merge, max_iter=3, random_state=0, device="cpu"
        ).fit(bank, init=mixture)
        mu = torch.as_tensor(mixture.mean_directions_, dtype=torch.float32)
        kappa = losses.relative_concentrations(torch.as_tensor(mixture.concentrations_, dtype=torch.float32))
        near = min(NEAREST, len(mu))
        total = 0.0
        network.train()
        for batch in torch.randperm(len(images)).split(BATCH):
            (v_1, z_1), (v_2, z_2) = network(view(images[batch])), network(view(images[batch]))
            similarity, nearest = (bank[batch] @ mu.T).topk(near)
            weight = losses.assignment_weights(similarity, TEMPERATURE)
            pulled = [losses.soft_assignment_loss(v, mu[nearest], kappa[nearest], weight) for v in (v_1, v_2)]
            loss = losses.final_loss((pulled[0] + pulled[1]) / 2, losses.instance_loss(v_1, v_2, z_1, z_2))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.item() * len(batch)
        sys.stdout.write(f"epoch {epoch + 1}: loss {total / len(images):.3f}, {mixture.n_components_} clusters\n")


if __name__ == "__main__":
    main(sys.argv[1:])
