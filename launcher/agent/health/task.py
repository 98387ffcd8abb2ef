"""Tasks of models, in vLLM's terms, and the requests for each.

vLLM 0.32 has routes only for the tasks of its model (vllm/entrypoints/pooling/factories.py,
vllm/entrypoints/launchers/api_server/routers.py). Any other route answers 404; a route shared by
several tasks answers 501 if the model has no handler for it. Such an answer shows only that the
model does not have the task, and nothing about the engine's health.

Pure; standard library only.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from ... import upstream


@dataclass(frozen=True)
class Form:
    """Request body that is not JSON, such as a multipart form."""

    data: bytes
    content_type: str


@dataclass(frozen=True)
class ModelTask:
    """One kind of request to a model.

    `answer_noun` names its answer. If `selects_replica`, a header chooses the replica that answers
    (vllm/entrypoints/generate/base/serving.py); else vLLM does.
    """

    name: str
    path: str
    answer_noun: str
    selects_replica: bool = False

    def body(self, model: str, prompt: str, max_tokens: int) -> object:
        """Return the request body; None if a GET is enough."""
        base: dict[str, Any] = {"model": model}
        sampling = {"max_tokens": max_tokens, "temperature": 0}
        if self is CHAT:
            return {**base, **sampling, "messages": [{"role": "user", "content": prompt}]}
        if self is COMPLETION:
            return {**base, **sampling, "prompt": prompt}
        if self is RERANK:
            return {**base, "query": prompt, "documents": [prompt]}
        if self is TRANSCRIPTION:
            return _build_silence_form(model)
        return None if self is HEALTH else {**base, "input": prompt}

    def describe_answer(self, text: str) -> str:
        """Describe a 200 answer of a model that does not generate; empty if unexpected."""
        if self is HEALTH:
            return self.noun_phrase
        try:
            return self._describe_payload(json.loads(text))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return ""

    def _describe_payload(self, payload: Any) -> str:
        if self is TRANSCRIPTION:
            return self.noun_phrase if isinstance(payload["text"], str) else ""
        if self is RERANK:
            return f"{self.noun_phrase} of {float(payload['results'][0]['relevance_score']):.3g}"
        name, unit = _FIELDS[self.name]
        values = payload["data"][0][name]
        return f"{self.noun_phrase} of {len(values)} {unit}" if values else ""

    @property
    def noun_phrase(self) -> str:
        """Noun for the answer, with its article."""
        return f"{'an' if self.answer_noun[0] in 'ae' else 'a'} {self.answer_noun}"

    @property
    def generates(self) -> bool:
        """True for a model with chat or completions."""
        return self is CHAT or self is COMPLETION


_ROUTE = upstream.text
CHAT = ModelTask("chat", _ROUTE("vllm.route-chat"), "completion", selects_replica=True)
COMPLETION = ModelTask(
    "completion", _ROUTE("vllm.route-completions"), "completion", selects_replica=True
)
EMBEDDING = ModelTask("embedding", _ROUTE("vllm.route-embeddings"), "embedding")
RERANK = ModelTask("rerank", _ROUTE("vllm.route-rerank"), "score")
CLASSIFY = ModelTask("classify", _ROUTE("vllm.route-classify"), "classification")
POOLING = ModelTask("pooling", _ROUTE("vllm.route-pooling"), "pooled output")
TRANSCRIPTION = ModelTask("transcription", _ROUTE("vllm.route-transcriptions"), "transcription")
# for a model without any known task
HEALTH = ModelTask("health", _ROUTE("vllm.route-health"), "answer of `/health` alone")
ONLY_HEALTH = "no known request fits its model, so only `/health` is checked"
# Those that do not generate, in the order in which they are tried: a model that embeds can rank as
# well, and all but the last have `/pooling`.
OTHERS = (EMBEDDING, RERANK, CLASSIFY, POOLING, TRANSCRIPTION)
_ALL = {task.name: task for task in (CHAT, COMPLETION, *OTHERS, HEALTH)}
_FIELDS = {
    "embedding": ("embedding", "numbers"),
    "classify": ("probs", "labels"),
    "pooling": ("data", "values"),
}


def task_named(name: str) -> ModelTask | None:
    """Return the task of a recorded name; None if it is unknown."""
    return _ALL.get(name)


def lacks_chat_template(status: int, text: str) -> bool:
    """True if a model cannot chat: base models have no chat template."""
    missing = upstream.text("vllm.chat-template-missing")
    return lacks_task(status, text) or (status == 400 and missing in text)


def lacks_task(status: int, text: str) -> bool:
    """True for an answer that shows that the model does not have the task: the route, or its
    handler, is missing. An unknown model name (404, too) is another matter.
    """
    if status == 404:
        return upstream.text("vllm.model-unknown") not in text
    return status in (405, 501)


def _build_silence_form(model: str) -> Form:
    """Return an upload of a second of silence: a WAV file of 16 kHz, 16 bits, one channel."""
    rate, frames = 16_000, bytes(2 * 16_000)
    format_chunk = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    chunks = b"WAVE" + format_chunk + struct.pack("<4sI", b"data", len(frames)) + frames
    sound = struct.pack("<4sI", b"RIFF", len(chunks)) + chunks
    boundary = "vlaunch-7f3a9c"
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="silence.wav"\r\n'
        "Content-Type: audio/wav\r\n\r\n"
    )
    data = head.encode() + sound + f"\r\n--{boundary}--\r\n".encode()
    return Form(data, f"multipart/form-data; boundary={boundary}")
