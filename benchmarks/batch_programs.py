"""What the benchmark of batches runs on the head: engines called directly, what Ray remembers of a
job, and how much memory its driver had.
"""

from __future__ import annotations

# The engine called directly, on the rows that `rows` makes: seconds to load it, and seconds for all
# rows.
DIRECT = """\
import json, sys, time
began = time.monotonic()
from vllm import LLM, SamplingParams
asked = json.loads(sys.argv[1])
llm = LLM(asked["model"], **asked["args"])
prompts = [asked["prompt"].replace("{{ text }}", asked["text"] % n) for n in range(asked["rows"])]
loaded = time.monotonic()
out = llm.generate(prompts, SamplingParams(**asked["sampling"]), use_tqdm=False)
ended = time.monotonic()
tokens = sum(len(each.outputs[0].token_ids) for each in out)
found = {"load": loaded - began, "answer": ended - loaded, "rows": len(out), "tokens": tokens}
print("\\nFOUND" + json.dumps(found))
"""
# The same by the engine class that servers and Ray Data LLM use, as many rows at a time as Ray Data
# LLM lets in.
ASYNC = """\
import asyncio, json, math, sys, time
began = time.monotonic()
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
asked = json.loads(sys.argv[1])

async def main():
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=asked["model"], **asked["args"]))
    texts = [asked["text"] % number for number in range(asked["rows"])]
    prompts = [asked["prompt"].replace("{{ text }}", text) for text in texts]
    room = asyncio.Semaphore(math.ceil(1.1 * (asked["args"].get("max_num_seqs") or 1024)))

    async def one(number, prompt):
        sampling = SamplingParams(**asked["sampling"], output_kind=RequestOutputKind.FINAL_ONLY)
        async with room:
            async for out in llm.generate(prompt, sampling, str(number)):
                pass
        return out

    loaded = time.monotonic()
    out = await asyncio.gather(*(one(*each) for each in enumerate(prompts)))
    ended = time.monotonic()
    tokens = sum(len(each.outputs[0].token_ids) for each in out)
    found = {"load": loaded - began, "answer": ended - loaded, "rows": len(out), "tokens": tokens}
    print("\\nFOUND" + json.dumps(found))
    llm.shutdown()

asyncio.run(main())
"""
# The most memory that the driver ever had, once a second until it is gone.
WATCH = """\
deadline=$(($(date +%s) + 120)) pid=
until [ "$pid" ]; do
  [ "$(date +%s)" -lt $deadline ] || exit 1
  sleep 0.2
  for each in $(grep -lza '/NAME$' /proc/[0-9]*/cmdline 2>/dev/null); do
    each=${each%/cmdline}
    grep -qza '^vlaunch_batch$' "$each/cmdline" && pid=${each#/proc/}
  done
done
while now=$(awk '/VmHWM/ {print $2}' /proc/$pid/status 2>/dev/null) && [ -n "$now" ]; do
    most=$now
    sleep 1
done
echo "$most"
"""
# When Ray was given a job and started what is in it, by its own records, in seconds since 1970.
# Workers report to it once a second, or later where others have the cores; what one has not told
# before it ends is lost, as may be the first rows of a very short job.
MOMENTS = """\
import json, re, sys, time
from ray.util.state import list_jobs, list_tasks
ours = re.compile(rf"batch-{re.escape(sys.argv[1])}-[0-9]+")
jobs = [each for each in list_jobs(detail=True) if ours.fullmatch(each.submission_id or "")]
job = max(jobs, key=lambda each: each.start_time)
for look in range(30):
    time.sleep(2)
    tasks = list_tasks(filters=[("job_id", "=", job.job_id)], detail=True, limit=9999)
    tasks = [each for each in tasks if "Replica" in each.name and each.start_time_ms]
    made = [each for each in tasks if each.type == "ACTOR_CREATION_TASK" and each.end_time_ms]
    given = [each for each in tasks if "submit" in each.name]
    if made and (given or look > 2):
        break
found = {
    "submitted": job.start_time,
    "asked": min(each.creation_time_ms for each in made),
    "process": min(each.start_time_ms for each in made),
    "processes": max(each.start_time_ms for each in made),
    "engines": max(each.end_time_ms for each in made),
    "given": min((each.start_time_ms for each in given), default=0),
}
found["given"] = found["given"] or found["engines"]
print("FOUND" + json.dumps({name: moment / 1000 for name, moment in found.items()}))
"""
# A class that does nothing.
IDLE = """\
class Idle:
    def __call__(self, batch):
        return {"length": [len(text) for text in batch["text"]]}
"""
