"""`vlaunch plan`: the best layout of a model, and whether it fits, before any start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.selection import select_model
from launcher.app.terminal import dump_json, print_field
from launcher.core.errors import RequestError
from launcher.planner import choice, plan_view
from launcher.planner.advice import serve_commands
from launcher.planner.choice import Demand, PlannedLayout, PlanQuestion
from launcher.planner.cluster import ClusterLink
from launcher.planner.flags import EngineFlags, parse_flags, parse_length
from launcher.planner.plan_json import plan_json

if TYPE_CHECKING:
    from launcher.planner.plan_inputs import Model, PlanInputs

_EXIT_CODES = {"fits": 0, "tight": 3, "does-not-fit": 1}


@command("plan", shows="people", flags=[options.JSON])
@click.option(
    "--model",
    metavar="MODEL",
    help="Model name on Hugging Face, or a folder on this machine or on the nodes.",
)
@click.option(
    "--context",
    metavar="TOKENS",
    help="Length of the longest request in tokens, such as 32768 (default: the model's).",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Concurrent requests.",
)
@click.option("--tp", type=click.IntRange(1), help="Tensor parallel size (default: chosen).")
@click.option("--pp", type=click.IntRange(1), help="Pipeline parallel size (default: chosen).")
@click.option(
    *options.DP_FLAGS, type=click.IntRange(1), help="Data parallel size (default: chosen)."
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The model's config.json, if the model itself is not available.",
)
@click.option(
    "--weights-bytes",
    type=click.IntRange(1),
    help="With --config: size of the safetensors files in bytes.",
)
@click.option("--gpu", metavar="NAME", help="Plan for this GPU, such as H100; contact no node.")
@click.option(
    "--gpu-memory-gib",
    type=click.FloatRange(0.5),
    help="Memory of one GPU as CUDA reports it, in GiB.",
)
@click.option(
    "--gpus-per-node",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="With --gpu: GPUs per node.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="With --gpu: number of nodes.",
)
@click.option(
    "--no-nodes",
    is_flag=True,
    help="Take nodes and GPU counts from the inventory; contact no node. Needs --gpu.",
)
@click.option(
    "--nvlink/--no-nvlink", default=None, help="Assume NVLink between the GPUs of a node, or none."
)
@click.option("--rdma/--no-rdma", default=None, help="Assume RDMA between nodes, or none.")
@click.option(
    "--link-gbps",
    type=click.FloatRange(0.01),
    help="Measured bandwidth between nodes per GPU, in GB/s.",
)
@click.option(
    "--link-latency-us", type=click.FloatRange(0.1), help="Measured latency between nodes, in µs."
)
@click.option("--explain", is_flag=True, help="Show the arithmetic of each stage.")
@click.argument("args", metavar="[-- VLLM ARGS]", nargs=-1, type=click.UNPROCESSED)
def plan(
    call: CommandContext,
    model: str | None,
    context: str | None,
    concurrency: int,
    tp: int | None,
    pp: int | None,
    dp: int | None,
    config: Path | None,
    weights_bytes: int | None,
    gpu: str | None,
    gpu_memory_gib: float | None,
    gpus_per_node: int,
    nodes: int,
    no_nodes: bool,
    nvlink: bool | None,
    rdma: bool | None,
    link_gbps: float | None,
    link_latency_us: float | None,
    explain: bool,
    args: tuple[str, ...],
) -> int:
    """Choose the parallelism of a model for these GPUs, and estimate its KV cache; start nothing.

    The GPUs are those of the inventory's nodes, which are queried, or those that --gpu describes.
    Exit codes: 0 fits, 3 tight, 1 does not fit.
    """
    from launcher.planner import plan_inputs

    link = ClusterLink(nvlink=nvlink, gbps=link_gbps, latency_us=link_latency_us, rdma=bool(rdma))
    context_tokens = _parse_context(context)
    described = gpu is not None or gpu_memory_gib is not None
    local = plan_inputs.read_local_model(model, config, weights_bytes)
    if described or no_nodes:
        if local is None:
            raise RequestError(
                f"model {model} is not on this machine" if model else "no model given",
                hint="pass an existing folder as `--model`, or `--config FILE --weights-bytes N`;"
                " omit `--gpu` and `--no-nodes` to find the model on the nodes",
            )
        counts = (
            {node.name: node.gpus for node in call.inventory.nodes}
            if no_nodes
            else {f"node{at:02}": gpus_per_node for at in range(1, nodes + 1)}
        )
        cluster = plan_inputs.describe_cluster(gpu, gpu_memory_gib, counts, link)
        name, read, size = local
        inputs = plan_inputs.PlanInputs(name=name, model=read, weight_bytes=size, cluster=cluster)
    else:
        inputs = _query_nodes(call, model, local, link)
    flags = _read_flags(call, args, described=described and not no_nodes)
    context_tokens = context_tokens or flags.length or inputs.model.context or 4096
    question = PlanQuestion(
        model=inputs.model,
        weight_bytes=inputs.weight_bytes,
        cluster=inputs.cluster,
        demand=Demand(context=context_tokens, requests=concurrency),
        flags=flags,
        starts=inputs.starts,
    )
    chosen = _plan_layout(question, tp, pp, dp)
    _print_plan(call, inputs.name, question, chosen, args, explain=explain)
    return _EXIT_CODES[chosen.verdict]


def _read_flags(call: CommandContext, args: tuple[str, ...], *, described: bool) -> EngineFlags:
    """Parse the arguments; also the inventory's, unless the cluster is only described."""
    if described:
        return parse_flags(args)
    from launcher.planner.plan_inputs import engine_env

    inventory = call.inventory
    return parse_flags((*inventory.serve.args, *args), engine_env(inventory))


def _parse_context(text: str | None) -> int | None:
    if text is None:
        return None
    tokens = parse_length(text)
    if tokens is None:
        raise click.UsageError(
            f"--context {text}: not a number of tokens such as 32768, 32k (32,000) or 32K (32,768)"
        )
    return tokens


def _query_nodes(
    call: CommandContext, model: str | None, local: Model | None, link: ClusterLink
) -> PlanInputs:
    from launcher.planner import plan_inputs

    inventory = call.inventory
    name = model or inventory.serve.model or "" if local else select_model(model, inventory)
    with call.session() as session:
        return plan_inputs.query_inputs(session, name, link, local)


def _plan_layout(
    question: PlanQuestion, tp: int | None, pp: int | None, dp: int | None
) -> PlannedLayout:
    """Judge the layout from the flags, or choose one. Raises RequestError if it cannot run."""
    if tp is None and pp is None and dp is None:
        return choice.choose_layout(question)
    layout = choice.Layout(
        tp=tp or 1,
        pp=pp or 1,
        dp=dp or 1,
        experts=question.flags.expert_parallel,
        exact=dp is not None,
        reasons=(choice.Reason("asked", "requested layout"),),
    )
    objection = choice.tp_objection(question.model, layout.tp, expert_parallel=layout.experts)
    if objection and not question.model.unmodelled_reason:
        raise RequestError(
            f"{layout.description} cannot run: {objection.text}",
            evidence=objection.source,
            hint="run the same command without --tp, --pp and --dp; it chooses a layout that can",
        )
    if layout.gpus_per_replica * layout.dp > question.cluster.gpus:
        raise RequestError(
            f"{layout.description} takes {layout.gpus_per_replica * layout.dp} GPUs; there are"
            f" {question.cluster.gpus}",
            hint="run the same command without --tp, --pp and --dp; it chooses a layout that fits",
        )
    return question.judge_layout(layout)


def _print_plan(
    call: CommandContext,
    name: str,
    question: PlanQuestion,
    chosen: PlannedLayout,
    args: tuple[str, ...],
    *,
    explain: bool,
) -> None:
    if call.as_json:
        run = serve_commands(name, question, chosen, args)
        click.echo(dump_json({**plan_json(question, chosen), "run": list(run)}))
        return
    for row in plan_view.plan_rows(name, question, chosen, args):
        print_field(row)
    for row in plan_view.stage_rows(chosen) if explain else ():
        print_field(row)
