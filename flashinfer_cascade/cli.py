"""The command line: plan a batch, run the demo and the benchmark, look at the machine."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from flashinfer_cascade import __version__
from flashinfer_cascade.bench.options import bench, calibrate
from flashinfer_cascade.bench.traces import mooncake_batches
from flashinfer_cascade.bench.workloads import grid
from flashinfer_cascade.config import MAX_INT32, CascadeConfig, PlannerPolicy
from flashinfer_cascade.cost import Backend
from flashinfer_cascade.errors import (
    BackendUnavailableError,
    CascadeError,
    InvalidBatchError,
    UnsupportedError,
)
from flashinfer_cascade.plan import CascadePlan
from flashinfer_cascade.planner import CascadePlanner
from flashinfer_cascade.profile import PROFILES, DeviceProfile
from flashinfer_cascade.report import summary

if TYPE_CHECKING:
    from flashinfer_cascade.bench.demo import DemoResult

app = typer.Typer(
    help="Cascade attention plans: which shared KV prefixes to read once, and what that saves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
_PageSize = Annotated[int, typer.Option(help="Tokens a KV page holds.")]
_QoHeads = Annotated[int, typer.Option(help="Query heads on one rank.")]
_KvHeads = Annotated[int, typer.Option(help="KV heads on one rank.")]
_HeadDim = Annotated[int, typer.Option(help="64, 128 or 256.")]
_Dtype = Annotated[str, typer.Option(help="Of q and the KV cache: bfloat16 or float16.")]


def main() -> None:
    """Entry point of ``flashinfer-cascade``."""
    app()


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """What the user got wrong becomes one line and exit status 2."""
    try:
        yield
    except BrokenPipeError:  # nobody reads on, as in "| head"
        raise
    except (CascadeError, pydantic.ValidationError, OSError) as error:
        if isinstance(error, pydantic.ValidationError):
            found = error.errors()[0]
            where = ".".join(map(str, found["loc"]))
            message = f"{where}: {found['msg']}" if where else found["msg"].removeprefix("Value error, ")
        elif isinstance(error, OSError) and error.strerror:
            message = f"{error.filename}: {error.strerror}"
        else:
            message = str(error)
        typer.echo(f"error: {' '.join(message.split())}", err=True)
        raise typer.Exit(2) from error


app.command()(_one_line_errors()(bench))
app.command()(_one_line_errors()(calibrate))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashinfer-cascade {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def plan(
    path: Annotated[
        str | None,
        typer.Argument(
            help='JSON: {"block_tables": [[...]], "seq_lens": [...], "qo_lens": [...] (optional)}; "-" reads it '
            "from stdin. Or a trace in Mooncake's form, *.jsonl."
        ),
    ] = None,
    workload: Annotated[str | None, typer.Option(help="A workload of the benchmark grid, such as P10.")] = None,
    batch: Annotated[int, typer.Option(help="Prompts of a trace that make a batch.")] = 64,
    skip: Annotated[int, typer.Option(min=0, help="Batches of a trace to skip.")] = 0,
    samples: Annotated[int, typer.Option(help="Requests for each prompt of a trace.")] = 1,
    page_size: _PageSize = 16,
    num_qo_heads: _QoHeads = 32,
    num_kv_heads: _KvHeads = 8,
    head_dim: _HeadDim = 128,
    dtype: _Dtype = "bfloat16",
    profile: Annotated[
        str, typer.Option(help=f"The GPU: {', '.join(PROFILES)}, or a JSON file with a profile.")
    ] = "h200",
    executor: Annotated[str, typer.Option(help="auto, flat, levels, segments or stock.")] = "auto",
    max_levels: Annotated[int, typer.Option(help="Most levels of a plan.")] = 8,
    as_json: AsJson = False,
    picture: Annotated[Path | None, typer.Option(help="Draw the forest into this SVG file.")] = None,
) -> None:
    """Plan one batch and explain the plan."""
    with _one_line_errors():
        if (path is None) == (workload is None):
            raise InvalidBatchError("give either a file or --workload")
        config = CascadeConfig(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            max_batch_size=MAX_INT32,
            max_num_rows=MAX_INT32,
            max_kv_pages=MAX_INT32,
            max_kv_indices=MAX_INT32,
        )
        policy = PlannerPolicy.model_validate({"executor": executor, "max_levels": max_levels})
        planner = CascadePlanner(config, policy, _read_profile(profile))
        name, *given = _read_batch(path, workload, page_size, batch, skip, samples)
        planned = planner.plan(*given)
        if picture is not None:
            _draw(planned, picture)
        if as_json:
            head = {"batch": name, "profile": planner.profile.name}
            typer.echo(json.dumps(head | summary(planned), indent=2))
        else:
            console = Console()
            console.print(f"{name}, on the {planner.profile.name} profile", style="bold", highlight=False)
            if console.is_terminal:
                console.print(planned)
            else:  # a pipe has no width to fit into
                typer.echo(planned.explain())


def _draw(planned: CascadePlan, path: Path) -> None:
    from flashinfer_cascade.picture import write_picture

    write_picture(planned, path)


def _read_profile(name: str) -> DeviceProfile:
    if name in PROFILES:
        return PROFILES[name]
    if not name.endswith(".json"):
        raise UnsupportedError(
            f"--profile {name}: choose from {', '.join(PROFILES)}, or give a .json file with the fields of "
            "DeviceProfile"
        )
    return DeviceProfile.model_validate_json(Path(name).read_bytes())


def _read_batch(
    path: str | None, workload: str | None, page_size: int, batch: int, skip: int, samples: int
) -> tuple[str, Any, Any, Any]:
    """Name, block tables, seq_lens and qo_lens."""
    if workload is not None:
        (found,) = grid([workload], page_size)
    elif path is not None and path.endswith(".jsonl"):
        batches = mooncake_batches(Path(path), batch, page_size, samples)
        beyond = next(islice(batches, skip, None), None)
        if beyond is None:
            raise InvalidBatchError(f"{path}: no batch of {batch} prompts is left after skipping {skip}")
        found = beyond
    else:
        return _read_json(path or "-")
    return found.name, found.block_tables, found.seq_lens, found.qo_lens


def _read_json(path: str) -> tuple[str, Any, Any, Any]:
    name = "stdin" if path == "-" else Path(path).name
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        given = json.loads(text)
    except (ValueError, RecursionError) as error:  # also bytes that are no text, and brackets without end
        raise InvalidBatchError(f"{name}: not JSON ({error})") from error
    needed, known = {"block_tables", "seq_lens"}, {"block_tables", "seq_lens", "qo_lens"}
    if not isinstance(given, dict) or not needed <= set(given) <= known:
        keys = ", ".join(sorted(given)) if isinstance(given, dict) else f"a {type(given).__name__}"
        raise InvalidBatchError(f"{name}: give an object with block_tables, seq_lens and maybe qo_lens, not {keys}")
    return name, given["block_tables"], given["seq_lens"], given.get("qo_lens")


@app.command()
def demo(
    only: Annotated[list[str] | None, typer.Option(help="Run this workload alone; may be given several times.")] = None,
    as_json: AsJson = False,
    picture_dir: Annotated[Path | None, typer.Option(help="Draw each plan into an SVG file in this folder.")] = None,
    serving: Annotated[
        bool, typer.Option("--serve", help="Serve requests with a small engine instead, flat and with cascades.")
    ] = False,
) -> None:
    """Plan and execute batches of real traces on the CPU, each checked against an fp64 oracle.

    Every workload runs twice: as the planner chooses, and as a cascade over every shared node ("forced"), so that
    cascades are executed where they do not pay too. Exits with 1 when a result is outside its error budget.

    With --serve, a tiny model serves samples, tool calls and a trace, in small; the logits of both ways are compared.
    """
    if serving:
        _demo_serve(only, as_json, picture_dir)
        return
    with _one_line_errors():
        try:
            from flashinfer_cascade.bench.demo import execute, select
        except ImportError as error:
            raise BackendUnavailableError(f"the demo executes with torch ({error}): pip install torch") from error
        if picture_dir is not None:
            picture_dir.mkdir(parents=True, exist_ok=True)
        results: list[DemoResult] = []
        for name in track(select(only), "running", console=Console(stderr=True), transient=True):
            for result, planned in execute(name):
                results.append(result)
                if picture_dir is not None:
                    _draw(planned, picture_dir / f"{name}-{result.policy}.svg")
        failed = [result for result in results if not result.ok]
        if as_json:
            typer.echo(json.dumps([dataclasses.asdict(result) | {"ok": result.ok} for result in results], indent=2))
        else:
            _print_demo(results)
            typer.echo(f"{len(results) - len(failed)} of {len(results)} executed plans agree with the fp64 oracle")
        if failed:
            raise typer.Exit(1)


def _demo_serve(only: list[str] | None, as_json: bool, picture_dir: Path | None) -> None:
    with _one_line_errors():
        try:
            from flashinfer_cascade.engine.cases import SMALL, SMALL_OPTIONS, ServeOptions
            from flashinfer_cascade.engine.serve import agrees, serve
        except ImportError as error:
            raise BackendUnavailableError(f"the demo executes with torch ({error}): pip install torch") from error
        if picture_dir is not None:
            raise UnsupportedError("--picture-dir draws the plans of single batches: leave it or --serve out")
        for name in only or ():
            if name not in SMALL:
                raise InvalidBatchError(f"the demo serves no {name!r}: choose from {', '.join(SMALL)}")
        changes = {name: change for name, change in SMALL.items() if not only or name in only}
        record = serve(ServeOptions(**SMALL_OPTIONS), changes, Console(quiet=as_json))
        if as_json:
            typer.echo(json.dumps(record, indent=2))
        if not agrees(record):
            raise typer.Exit(1)


def _print_demo(results: list[DemoResult]) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for column in ("workload", "plan"):
        table.add_column(column)
    numbers = ("requests\n/rows", "nodes", "levels", "KV\nread", "speed-\nup", "plan\nus", "max\nerror", "budget")
    for column in (*numbers, ""):
        table.add_column(column, justify="right", no_wrap=True)
    for r in results:
        table.add_row(
            r.workload,
            r.executor + ("*" if r.policy == "forced" else ""),
            f"{r.num_requests}/{r.num_rows}",
            str(r.num_nodes),
            str(r.num_levels),
            f"1/{r.kv_saving:.1f}",
            f"{r.predicted_speedup:.2f}x",
            f"{r.plan_us:.0f}",
            f"{r.max_error:.4f}",
            f"{r.budget:.4f}",
            Text("ok", "green") if r.ok else Text("FAILED", "bold red"),
        )
    console = Console()
    console.print(table)
    console.print(
        "\n* forced, not chosen: a cascade over every shared node"
        "\n8 query and 2 KV heads, one of four ranks of 32/8; KV read: bytes against flat"
        "\nspeed-up: predicted on an H200; plan us: measured"
        "\nmax error: relative L2 of a (row, head); budget: twice that of plain bfloat16\n",
        highlight=False,
    )


def _compile(config: CascadeConfig) -> None:
    from flashinfer_cascade.runtime import CascadeRuntime
    from flashinfer_cascade.runtime.launch import compile_backend

    device = CascadeRuntime(config, device="cuda").device
    backends: tuple[Backend, ...] = ("fa2", "decode", "fa3")
    for backend in backends:
        started = time.monotonic()
        try:
            with Console(stderr=True).status(f"{backend}: compiling takes 20 to 90 s, unless it was done before"):
                compile_backend(config, backend, device)
        except UnsupportedError as error:
            typer.echo(f"{backend}: not here: {error}")
        else:
            typer.echo(f"{backend}: ready after {time.monotonic() - started:.0f} s")


@app.command()
def doctor(
    as_json: AsJson = False,
    compile_kernels: Annotated[
        bool, typer.Option("--compile", help="Compile FlashInfer's kernels for the configuration below, once.")
    ] = False,
    num_qo_heads: _QoHeads = 32,
    num_kv_heads: _KvHeads = 8,
    head_dim: _HeadDim = 128,
    page_size: _PageSize = 16,
    dtype: _Dtype = "bfloat16",
    kv_dtype: Annotated[str | None, typer.Option(help="Of the KV cache; --dtype by default.")] = None,
    logits_soft_cap: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    window_left: Annotated[int, typer.Option(help="-1 is off.")] = -1,
) -> None:
    """Say what this machine can run, and why not the rest."""
    from flashinfer_cascade.doctor import examine, findings

    if compile_kernels:
        with _one_line_errors():
            config = CascadeConfig(
                num_qo_heads=num_qo_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                page_size=page_size,
                dtype=dtype,
                kv_dtype=kv_dtype or dtype,
                logits_soft_cap=logits_soft_cap,
                window_left=window_left,
            )
            _compile(config)
        return
    examined = examine()
    if as_json:
        typer.echo(json.dumps(examined, indent=2))
        return
    console = Console()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in findings(examined):
        mark = Text("ok", "green") if finding.ok else Text("--", "yellow")
        table.add_row(finding.name, mark, finding.found)
    console.print(table)
    executors = Table(title="executors", title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, why_not in examined["executors"].items():
        state = Text("available", "green") if why_not is None else Text(f"not here: {why_not}", "yellow")
        executors.add_row(name, state)
    console.print()
    console.print(executors)
    console.print("\nPlanning needs none of these: it runs anywhere.", highlight=False)
