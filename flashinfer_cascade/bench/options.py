"""Options of the command ``flashinfer-cascade bench``; torch begins behind them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flashinfer_cascade.bench import cases
from flashinfer_cascade.errors import BackendUnavailableError, InvalidBatchError


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [item.strip() for item in text.split(",") if item.strip()]


def _numbers(option: str, text: str | None, separator: str, count: int) -> list[list[int]]:
    """Items of so many numbers each, such as ``32/8,16/1``; empty when not given."""
    items = []
    for item in _listed(text) or ():
        numbers = item.split(separator)
        if len(numbers) != count or not all(number.isdecimal() and int(number) > 0 for number in numbers):
            form = separator.join(["N"] * count)
            raise InvalidBatchError(f"{option} {item!r} is not {form}: give positive numbers, comma-separated")
        items.append(list(map(int, numbers)))
    return items


def calibrate(
    records: Annotated[
        list[Path] | None, typer.Argument(help="Records of 'bench --json' to fit to; without, the decode suite is run.")
    ] = None,
    base: Annotated[str, typer.Option(help="Built-in profile to begin with.")] = "h200",
    name: Annotated[str, typer.Option(help="Of the new profile.")] = "calibrated",
    out: Annotated[Path, typer.Option(help="Where to write it.")] = Path("profile.json"),
) -> None:
    """Fit a device profile for the planner to measured times, and show what it predicts.

    One workload in three is not fitted to and only judges. Constants of executors that the records have no times of
    stay those of the base, and a warning says which. The planner takes the result:
    ``CascadePlanner(config, profile=read_profile("profile.json"))``.
    """
    from rich.console import Console

    from flashinfer_cascade.bench.calibrate import CONSTANTS, fit, fitted_to, read_samples, report
    from flashinfer_cascade.bench.results import read_record
    from flashinfer_cascade.profile import PROFILES

    if base not in PROFILES:
        raise InvalidBatchError(f"--base {base!r} is not built in: choose from {', '.join(PROFILES)}")
    if not records:
        records = [out.with_suffix(".record.json")]
        bench(json_path=records[0], suite="decode")
    read = [read_record(path) for path in records]
    hardware = read[0].hardware
    known: dict[str, object] = {"num_sms": int(hardware["num_sms"])}
    if "capability" in hardware:
        known["capability"] = tuple(map(int, str(hardware["capability"]).split(".")))
    begun = PROFILES[base].model_copy(update=known)
    console = Console(width=None if sys.stdout.isatty() else 120)
    samples = read_samples((row for record in read for row in record.rows), begun)
    with console.status("fitting") as status:
        fitted = fit(samples, begun, name, lambda constant, error: status.update(f"fitting {constant}: {error:.4f}"))
    for table in report(samples, begun, fitted):
        console.print(table)
    for executors, constants in CONSTANTS.items():
        if not fitted_to(samples, executors):
            typer.echo(
                f"warning: no time of {executors.replace(', ', ' or ')} to fit to, so these stay as in {base}: "
                f"{', '.join(constants)}. The planner weighs them against what was fitted: measure all executors, with "
                "'flashinfer-cascade bench --suite decode --json RECORD'",
                err=True,
            )
    out.write_text(fitted.model_dump_json(indent=1) + "\n", encoding="utf-8")
    console.print(f"wrote {out}")


def bench(
    suite: Annotated[
        str, typer.Option(help="decode, heads, append, fp8, irregular, several of them with commas, or all.")
    ] = "decode",
    workloads: Annotated[str | None, typer.Option(help="Of these suites, such as P1,P10,S1.")] = None,
    heads: Annotated[
        str | None, typer.Option(help="Query/KV heads rather than the suite's, such as 32/8,16/1.")
    ] = None,
    page_size: Annotated[str | None, typer.Option(help="Rather than the suite's, such as 16,1.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Rather than the suite's, such as float8_e4m3fn.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the record here, after every row.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue the record: rows that it has are not measured again.")] = False,
    deadline: Annotated[float | None, typer.Option(help="Seconds after which no row is begun.")] = None,
    quick: Annotated[bool, typer.Option(help="A few workloads, three repeats.")] = False,
    pool_gb: Annotated[float, typer.Option(min=0.1, help="GPU memory for KV caches.")] = 40.0,
    commit: Annotated[str | None, typer.Option(help="Of the code that is measured; git's HEAD by default.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Measure nothing: draw this record.")] = None,
    out: Annotated[Path, typer.Option(help="Folder that --plot draws into.")] = Path("."),
) -> None:
    """Measure this package's executors and FlashInfer's own ways on this GPU, side by side.

    Microseconds a layer in CUDA graphs, over rotating KV caches, turn and turn about; every result is held against
    an fp64 oracle. Exits with 1 when a result of this package is outside its error budget.
    """
    if plot is not None:
        from flashinfer_cascade.bench.plots import write_plots
        from flashinfer_cascade.bench.results import read_record

        for path in write_plots(read_record(plot), out):
            typer.echo(path)
        return
    chosen = cases.select(
        cases.suites(_listed(suite) or []),
        workloads=_listed(workloads),
        heads=[(query, kv) for query, kv in _numbers("--heads", heads, "/", 2)],
        page_sizes=[size for (size,) in _numbers("--page-size", page_size, "/", 1)],
        kv_dtypes=_listed(kv_dtype),
        quick=quick,
    )
    try:
        from flashinfer_cascade.bench import command
    except ImportError as error:
        raise BackendUnavailableError(f"the benchmark runs on torch and triton ({error}): install them") from error
    ok = command.bench(
        chosen,
        json_path,
        resume=resume,
        deadline_s=deadline,
        repeats=3 if quick else 5,
        pool_bytes=int(pool_gb * 1e9),
        commit=commit,
    )
    if not ok:
        raise typer.Exit(1)
