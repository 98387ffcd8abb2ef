"""What a model does, which vLLM calls its task, and how it is asked for that.

vLLM 0.32 has routes only for the tasks of its model (vllm/entrypoints/pooling/factories.py,
vllm/entrypoints/launchers/api_server/routers.py). Any other answers 404, and one that the model
shares with others, but has no handler for, 501. Whoever asks in a way that does not fit learns
that, and nothing about the engine.

Pure; standard library only.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Form:
    """A body of a request that is no JSON, with its `Content-Type`."""

    data: bytes
    kind: str


@dataclass(frozen=True, kw_only=True)
class Task:
    """One way to ask a model.

    `word` names what comes back. With `steered`, vLLM reads from a header which replica is to
    answer (vllm/entrypoints/generate/base/serving.py); else it chooses one itself.
    """

    name: str
    path: str
    word: str
    steered: bool = False

    def body(self, model: str, prompt: str, max_tokens: int) -> object:
        """Return what is sent; None where a GET is enough."""
        base: dict[str, Any] = {"model": model}
        sampling = {"max_tokens": max_tokens, "temperature": 0}
        if self is CHAT:
            return {**base, **sampling, "messages": [{"role": "user", "content": prompt}]}
        if self is COMPLETION:
            return {**base, **sampling, "prompt": prompt}
        if self is RERANK:
            return {**base, "query": prompt, "documents": [prompt]}
        if self is TRANSCRIPTION:
            return _spoken(model)
        return None if self is HEALTH else {**base, "input": prompt}

    def came(self, text: str) -> str:
        """Say what came back from a model that does not generate, of an answer of 200; empty where
        it is not what was asked for.
        """
        if self is HEALTH:
            return self.what
        try:
            return self._came(json.loads(text))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return ""

    def _came(self, payload: Any) -> str:
        if self is TRANSCRIPTION:
            return self.what if isinstance(payload["text"], str) else ""
        if self is RERANK:
            return f"{self.what} of {float(payload['results'][0]['relevance_score']):.3g}"
        name, unit = _FIELDS[self.name]
        values = payload["data"][0][name]
        return f"{self.what} of {len(values)} {unit}" if values else ""

    @property
    def what(self) -> str:
        """What comes back, with its article."""
        return f"{'an' if self.word[0] in 'ae' else 'a'} {self.word}"

    @property
    def generates(self) -> bool:
        """True for a model that one can talk to."""
        return self is CHAT or self is COMPLETION


CHAT = Task(name="chat", path="/v1/chat/completions", word="completion", steered=True)
COMPLETION = Task(name="completion", path="/v1/completions", word="completion", steered=True)
EMBEDDING = Task(name="embedding", path="/v1/embeddings", word="embedding")
RERANK = Task(name="rerank", path="/rerank", word="score")
CLASSIFY = Task(name="classify", path="/classify", word="classification")
POOLING = Task(name="pooling", path="/pooling", word="pooled output")
TRANSCRIPTION = Task(name="transcription", path="/v1/audio/transcriptions", word="transcription")
# for a model that can be asked in no way that we know
HEALTH = Task(name="health", path="/health", word="answer of `/health` alone")
ONLY_HEALTH = "no request of ours fits its model: `/health` is all that is asked of it"
# Those that do not generate, in the order in which they are tried: a model that embeds can rank as
# well, and all but the last have `/pooling`.
OTHERS = (EMBEDDING, RERANK, CLASSIFY, POOLING, TRANSCRIPTION)
_ALL = {each.name: each for each in (CHAT, COMPLETION, *OTHERS, HEALTH)}
_FIELDS = {
    "embedding": ("embedding", "numbers"),
    "classify": ("probs", "labels"),
    "pooling": ("data", "values"),
}


def named(name: str) -> Task | None:
    """Return the task of a name that was written down; None where there is none of it."""
    return _ALL.get(name)


def no_chat(status: int, text: str) -> bool:
    """True when a model cannot chat: base models have no chat template."""
    return unfit(status, text) or (status == 400 and "chat template" in text)


def unfit(status: int, text: str) -> bool:
    """True for an answer that says that the model has no such task: there is no route, or nothing
    behind it. That a model's name is not known (404, too) is another matter.
    """
    if status == 404:
        return "does not exist" not in text
    return status in (405, 501)


def _spoken(model: str) -> Form:
    """Return a form with a second of silence in it: a WAV file of 16 kHz, 16 bits, one channel."""
    rate, frames = 16_000, bytes(2 * 16_000)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    chunks = b"WAVE" + form + struct.pack("<4sI", b"data", len(frames)) + frames
    sound = struct.pack("<4sI", b"RIFF", len(chunks)) + chunks
    limit = "vlaunch-7f3a9c"
    head = (
        f'--{limit}\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n'
        f'--{limit}\r\nContent-Disposition: form-data; name="file"; filename="silence.wav"\r\n'
        "Content-Type: audio/wav\r\n\r\n"
    )
    data = head.encode() + sound + f"\r\n--{limit}--\r\n".encode()
    return Form(data, f"multipart/form-data; boundary={limit}")
