"""Text generation with a Hugging Face pipeline: made once per replica, called on batches of
lines.
"""

from typing import Any

import torch
from transformers import pipeline


class TextGeneration:
    """One pipeline, on the GPU if this replica has one."""

    def __init__(self, model: str = "HuggingFaceTB/SmolLM2-135M", max_new_tokens: int = 32) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.generate = pipeline("text-generation", model=model, device=device)
        tokenizer = self.generate.tokenizer
        tokenizer.padding_side = "left"  # the answer follows the prompt, so pad on the left
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.max_new_tokens = max_new_tokens

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answer a batch: `batch["text"]` is an array of lines; the result has one value for
        each.
        """
        prompts = list(batch["text"])
        made = self.generate(
            prompts,
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            batch_size=len(prompts),
            return_full_text=False,
        )
        return {"prompt": prompts, "generated": [answers[0]["generated_text"] for answers in made]}
