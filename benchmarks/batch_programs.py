"""Programs that the batch benchmarks run on the head: engines called directly, Ray's records of a
job, and the memory of its driver.
"""

from __future__ import annotations

# The engine called directly: seconds to load it, and seconds for all rows.
DIRECT = """\
import json, sys, time
began = time.monotonic()
from vllm import LLM, SamplingParams
job = json.loads(sys.argv[1])
llm = LLM(job["model"], **job["args"])
prompts = [job["prompt"].replace("{{ text }}", job["text"] % n) for n in range(job["rows"])]
loaded = time.monotonic()
out = llm.generate(prompts, SamplingParams(**job["sampling"]), use_tqdm=False)
ended = time.monotonic()
tokens = sum(len(answer.outputs[0].token_ids) for answer in out)
result = {"load": loaded - began, "answer": ended - loaded, "rows": len(out), "tokens": tokens}
print("\\nFOUND" + json.dumps(result))
"""
# Ray Data's processor with one engine. Its clock starts with the first answer, which is a batch too
# late.
PROCESSOR = """\
import json, sys, time
import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig
job = json.loads(sys.argv[1])
ray.init(address="auto", log_to_driver=False)
prompts = [job["prompt"].replace("{{ text }}", job["text"] % n) for n in range(job["rows"])]
config = vLLMEngineProcessorConfig(
    model_source=job["model"], engine_kwargs=job["args"], concurrency=(1, 1), batch_size=64,
    chat_template_stage=False, tokenize_stage=False, detokenize_stage=False,
)
processor = build_processor(
    config,
    preprocess=lambda row: {"prompt": row["item"], "sampling_params": job["sampling"]},
    postprocess=lambda row: {"tokens": row["num_generated_tokens"], "at": time.time()},
)
rows = processor(ray.data.from_items(prompts)).take_all()
times, tokens = [row["at"] for row in rows], sum(row["tokens"] for row in rows)
result = {"answer": max(times) - min(times), "rows": len(rows), "tokens": tokens}
print("\\nFOUND" + json.dumps(result))
"""
# The driver's peak memory, read once a second until the driver exits.
WATCH = """\
deadline=$(($(date +%s) + 120)) pid=
until [ "$pid" ]; do
  [ "$(date +%s)" -lt $deadline ] || exit 1
  sleep 0.2
  for file in $(grep -lza '/NAME$' /proc/[0-9]*/cmdline 2>/dev/null); do
    folder=${file%/cmdline}
    grep -qza '^vlaunch_batch$' "$folder/cmdline" && pid=${folder#/proc/}
  done
done
while now=$(awk '/VmHWM/ {print $2}' /proc/$pid/status 2>/dev/null) && [ -n "$now" ]; do
    most=$now
    sleep 1
done
echo "$most"
"""
# Times from Ray's records of a job, in seconds since 1970. Workers report once a second, or later
# on busy cores. A worker that exits loses its last report, so the first rows of a very short job
# may be missing.
MOMENTS = """\
import json, re, sys, time
from ray.util.state import list_jobs, list_tasks
ours = re.compile(rf"batch-{re.escape(sys.argv[1])}-[0-9]+")
jobs = [job for job in list_jobs(detail=True) if ours.fullmatch(job.submission_id or "")]
job = max(jobs, key=lambda job: job.start_time)
for attempt in range(30):
    time.sleep(2)
    tasks = list_tasks(filters=[("job_id", "=", job.job_id)], detail=True, limit=9999)
    tasks = [task for task in tasks if "Replica" in task.name and task.start_time_ms]
    created = [task for task in tasks if task.type == "ACTOR_CREATION_TASK" and task.end_time_ms]
    submitted = [task for task in tasks if "submit" in task.name]
    if created and (submitted or attempt > 2):
        break
moments = {
    "submitted": job.start_time,
    "asked": min(task.creation_time_ms for task in created),
    "process": min(task.start_time_ms for task in created),
    "processes": max(task.start_time_ms for task in created),
    "engines": max(task.end_time_ms for task in created),
    "given": min((task.start_time_ms for task in submitted), default=0),
}
moments["given"] = moments["given"] or moments["engines"]
print("FOUND" + json.dumps({name: moment / 1000 for name, moment in moments.items()}))
"""
# A class that does nothing.
IDLE = """\
class Idle:
    def __call__(self, batch):
        return {"length": [len(text) for text in batch["text"]]}
"""
