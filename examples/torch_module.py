"""A torch module of your own: its weights are loaded once per replica, and each batch is one
tensor.
"""

from typing import Any

import torch


class TorchModule:
    """A small network over four numbers; `weights` is a file that every node has, saved with
    `torch.save(state_dict)`.
    """

    def __init__(self, weights: str | None = None) -> None:
        torch.manual_seed(0)  # no weights to load: every replica must create the same network
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.module = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
        )
        if weights:
            self.module.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        self.module.to(self.device).eval()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answer a batch: `batch["data"]` is an array of rows by four."""
        with torch.inference_mode():
            data = torch.as_tensor(batch["data"], dtype=torch.float32, device=self.device)
            scores = self.module(data).softmax(dim=1).cpu().numpy()
        return {"label": scores.argmax(axis=1), "score": scores.max(axis=1)}
