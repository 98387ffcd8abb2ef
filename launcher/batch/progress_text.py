"""Progress of a batch job as text, the same in every command."""

from launcher.batch.driver.progress import FINAL_STATES, Progress
from launcher.core import sizes

_STATE_TEXTS = {
    "": "starting the driver",
    "starting": "starting the driver",
    "reading": "reading the input",
    "waiting": "waiting for free resources",
    "loading": "loading the model",
    "running": "answering rows",
    "finishing": "writing the last rows",
    **dict.fromkeys(FINAL_STATES, "stopping the driver"),
}


def state_text(state: str) -> str:
    """Return the description of a state."""
    return _STATE_TEXTS.get(state, state)


def progress_line(progress: Progress) -> str:
    """Return one line, most important first: a narrow terminal cuts it."""
    parts = [row_counts(progress)]
    if progress.errors:
        parts.append(f"{progress.errors:,} error{'' if progress.errors == 1 else 's'}")
    if progress.rows_per_second:
        parts.append(f"{sizes.format_rate(progress.rows_per_second)} rows/s")
    if progress.eta is not None and progress.state == "running":
        parts.append(f"{sizes.format_duration(progress.eta)} left")
    if progress.ready < progress.wanted:
        parts.append(f"{progress.ready} of {progress.wanted} replicas")
    if progress.restarts:
        parts.append(f"{progress.restarts} restart{'' if progress.restarts == 1 else 's'}")
    if progress.tokens_per_second:
        parts.append(f"{sizes.format_rate(progress.tokens_per_second)} tokens/s")
    if hours := gpu_hours(progress):
        parts.append(hours)
    return ", ".join(parts)


def gpu_hours(progress: Progress) -> str:
    """Return the GPU hours as text; empty if there are none."""
    hours = progress.gpu_hours
    return f"{sizes.format_rate(hours)} GPU hours" if hours >= 0.01 else ""


def row_counts(progress: Progress) -> str:
    """Return finished and total rows as text."""
    return (
        f"{progress.accounted:,} of {'?' if progress.rows is None else f'{progress.rows:,}'} rows"
    )
