"""One rank of a data-parallel run: a Ray actor on its node with one vLLM engine."""

from __future__ import annotations

import array
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..job import to_json
from . import cluster, order
from .engine_loop import is_engine_dead, watch_engine
from .generation import answer_columns, sampling_params, with_output
from .prompts import Prompter, PromptError
from .ray_internals import log_paths
from .results import Converter, Part, Row

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

# A killed actor would leave its engine's processes and their device memory behind. This process has
# neither parent nor group in common with them: it waits for the actor's exit, of any kind, and
# kills the rest of the group.
_REAPER = """
import os, select, signal, sys
leader = int(sys.argv[1])
if os.fork():
    os._exit(0)
os.setsid()
try:
    end = select.poll()
    end.register(os.pidfd_open(leader), select.POLLIN)
    end.poll()
except ProcessLookupError:
    pass
try:
    os.killpg(leader, signal.SIGKILL)
except ProcessLookupError:
    pass
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A rank's process, which is also its process group, and the log on its node."""

    pid: int
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """Settings of a rank: vLLM's environment variables and arguments of `vllm.LLM`."""

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Rank:
    """The actor.

    `together`: the ranks synchronize in every step of the model, so all must take the same steps.
    """

    def __init__(self, converter: Converter, together: bool) -> None:
        self.converter, self.job, self.together = converter, converter.job, together
        self.llm: LLM

    def hello(self) -> RankProcess:
        """Prepare this process: a process group that leaves nothing behind, and a single log;
        return them.
        """
        os.dup2(1, 2)  # one log, in order of events
        # a native crash of a child logs its location
        os.environ.setdefault("PYTHONFAULTHANDLER", "1")
        if os.getpgid(0) != os.getpid():
            os.setpgid(0, 0)
        subprocess.run([sys.executable, "-c", _REAPER, str(os.getpid())], check=True, timeout=60)
        return RankProcess(pid=os.getpid(), log=log_paths()[0])

    def load(self, setting: RankSettings) -> None:
        """Load the model, ignoring vLLM variables that another run left in this environment."""
        for name in [name for name in os.environ if name.startswith("VLLM_DP_")]:
            del os.environ[name]
        os.environ.update(setting.environment)
        cluster.label_log(self.job.name)
        from vllm import LLM

        self.params = sampling_params(to_json(self.job.sampling))
        self.prompter = Prompter(self.job)
        self.llm = LLM(**setting.arguments)
        watch_engine(self.llm)
        self.tokenizer = self.llm.get_tokenizer()
        self.prompter.check_template(self.tokenizer)

    def answer(self, rows: Sequence[Row]) -> list[Part]:
        """Answer rows as read, each exactly once and in order."""
        prompts: list[list[int] | Exception] = []
        for row in rows:
            try:
                data = pickle.loads(row["_data"])  # noqa: S301 - own data
                prompts.append(self.encode_prompt(data))
            # any exception from a template belongs to its row
            except Exception as problem:
                prompts.append(problem)
        token_ids = [prompt for prompt in prompts if not isinstance(prompt, Exception)]
        ask = self.step if self.together else self.generate_alone
        outputs = iter(order.ask_in_order(ask, token_ids, self.job.engine.order, prompt_key))
        return self.converter.convert(
            [
                with_output(row, prompt, answer_columns, "prompt")
                if isinstance(prompt, Exception)
                else with_output(row, next(outputs), answer_columns)
                for row, prompt in zip(rows, prompts, strict=True)
            ]
        )

    def encode_prompt(self, columns: Mapping[str, Any]) -> list[int]:
        """Return a row's prompt as token ids.

        Checks everything that vLLM would reject: it takes a batch as a whole or not at all.

        Raises:
            PromptError: the row has no prompt, or one that the model cannot take.
            UnicodeEncodeError: it is not text.
        """
        prompt = self.prompter(columns)
        chat = not isinstance(prompt, str)
        text = (
            prompt
            if isinstance(prompt, str)
            else self.prompter.chat(self.tokenizer, prompt, self.prompter.tools(columns))
        )
        text.encode()
        limit = int(self.llm.model_config.max_model_len)
        if len(text) > limit * getattr(self.tokenizer, "max_chars_per_token", len(text)):
            raise PromptError(
                f"the prompt has {len(text)} characters, more than {limit} tokens can hold"
                " (max_model_len)"
            )
        # A chat template already includes the special tokens.
        ids = list(self.tokenizer.encode(text, add_special_tokens=not chat))
        if not ids:
            raise PromptError("the prompt is empty")
        if len(ids) >= limit:
            raise PromptError(
                f"the prompt has {len(ids)} tokens; with an answer, at most {limit - 1} fit"
                " (max_model_len)"
            )
        return ids

    def step(self, token_ids: list[list[int]]) -> list[Any]:
        """Generate in step with the other ranks: exactly once per round, never without a prompt.

        An engine without a request takes no steps, and the others would wait for it in their next
        collective forever. Engines also agree at intervals if any has work left: one that had
        finished its first prompts while still receiving others would continue alone. So all engines
        pause after a round, take all prompts, and resume together. There is no second try.
        """
        from vllm import SamplingParams

        self.llm.sleep(level=0, mode="keep")
        batch = token_ids or [list(self.tokenizer.encode("placeholder")) or [0]]
        self.llm.enqueue(
            token_prompts(batch),
            self.params if token_ids else SamplingParams(max_tokens=1),
            use_tqdm=False,
        )
        self.llm.wake_up(tags=["scheduling"])
        outputs = list(self.llm.wait_for_completion(use_tqdm=False))
        if len(outputs) != len(batch):
            raise RuntimeError(
                f"vLLM was given {len(batch)} prompts and returned {len(outputs)} answers"
            )
        return outputs if token_ids else []

    def generate_alone(self, token_ids: list[list[int]]) -> list[Any]:
        """Generate; if vLLM rejects the batch, row by row, so that only the invalid row fails."""
        if not token_ids:
            return []
        try:
            return self.generate(token_ids, self.params)
        except Exception as problem:
            if is_engine_dead(problem):
                raise
        outputs: list[Any] = []
        for ids in token_ids:
            try:
                outputs.extend(self.generate([ids], self.params))
            except Exception as problem:
                if is_engine_dead(problem):
                    raise
                outputs.append(problem)
        return outputs

    def generate(self, token_ids: list[list[int]], params: SamplingParams) -> list[Any]:
        """Generate from prompts of token ids, in order."""
        outputs = list(self.llm.generate(token_prompts(token_ids), params, use_tqdm=False))
        if len(outputs) != len(token_ids):  # answers cannot be matched with prompts
            raise RuntimeError(
                f"vLLM was given {len(token_ids)} prompts and returned {len(outputs)} answers"
            )
        return outputs


def prompt_key(ids: list[int]) -> bytes:
    """Return a prompt's sort key."""
    return array.array(order.TOKENS, ids).tobytes()


def token_prompts(token_ids: list[list[int]]) -> list[dict[str, list[int]]]:
    """Return token ids as vLLM prompts."""
    return [{"prompt_token_ids": ids} for ids in token_ids]
