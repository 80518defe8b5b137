"""`tilewise bench --report`: stored results as one page and as plots, and old results beside new ones."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.cli import UserError
from tilewise.cli.bench_options import check_matplotlib, check_writable
from tilewise.explanation import size
from tilewise.kernels.disk import write_whole

if TYPE_CHECKING:
    from tilewise.bench.page.against import Comparison
    from tilewise.bench.page.measurement import Run

PLACE = Path("results")
_OWN = ("out", "plots", "against", "tolerance", "across_machines")
_MEASURING = (
    "n", "d", "variants", "dtype", "batch", "heads", "heads_k", "kernel", "threads", "backward", "repeat", "budget",
    "quick", "device", "no_memory", "json", "plot", "source",
)  # fmt: skip


def add_options(parser: Any, suite: Any) -> None:
    """suite: the group of which one may be asked for."""
    suite.add_argument(
        "--report", nargs="*", type=Path, metavar="RESULTS", help="one HTML page of the results in these files and "
        "folders (results); nothing is measured",
    )  # fmt: skip
    group = parser.add_argument_group("with --report")
    group.add_argument("-o", "--out", type=Path, metavar="FILE", help="where the page goes (report.html)")
    group.add_argument("--plots", type=Path, metavar="FOLDER", help="also write each chart as PNG and SVG")
    group.add_argument(
        "--against", nargs="+", type=Path, metavar="OLD", help="mark what became slower than in these results; "
        "the exit code is then 1",
    )  # fmt: skip
    group.add_argument("--tolerance", metavar="PERCENT", help="changes up to this are none (5)")
    group.add_argument("--across-machines", action="store_true", help="judge even where the machines differ")


def refuse_its_options(args: argparse.Namespace) -> None:
    """Where there is no --report."""
    for option in _given(args, _OWN):
        raise UserError(f"{option} goes with --report; add --report, or leave {option} out")


def _given(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    spelled = {"out": "-o", "source": "--from"}
    return [spelled.get(name, f"--{name.replace('_', '-')}") for name in names if getattr(args, name)]


def run(args: argparse.Namespace) -> int:
    for option in _given(args, _MEASURING):
        raise UserError(f"{option}: --report measures nothing; leave out {option}, or --report")
    out = args.out or Path("report.html")
    _check(args, out)
    places = args.report or [_place()]
    from tilewise.bench.page import trials
    from tilewise.bench.page.document import page

    judged = trials.found(places)
    runs, left_out = _runs(places, "--report", bool(judged))
    compared = _compared(args, runs)
    text = page(runs, compared, left_out, judged).encode()
    write_whole(out, text)
    count = sum(len(run.measurements) for run in runs)
    for path, why in left_out.items():
        print(f"left out: {path} {why}")
    trials_told = f", {len(judged)} trials" if judged else ""
    print(f"{out}: {count} measurements in {len(runs)} files{trials_told}, {size(len(text))}; open it in a browser")
    if args.plots is not None:
        _plot(runs, args.plots)
    return 1 if compared is not None and compared.regressions else 0


def _check(args: argparse.Namespace, out: Path) -> None:
    if out.is_dir():
        raise UserError(f"-o: expected a file, got the folder {str(out)!r}")
    check_writable("-o", str(out))
    if args.plots is not None:
        check_matplotlib("--plots")
        if args.plots.suffix or args.plots.is_file():
            raise UserError(f"--plots: expected a folder, got {str(args.plots)!r}")
        check_writable("--plots", str(args.plots))
    if args.against is None and (_given(args, _OWN[3:])):
        raise UserError(f"{_given(args, _OWN[3:])[0]} goes with --against OLD, the results to compare with")


def _place() -> Path:
    """Results of this folder, or of the working tree that the package lies in."""
    if PLACE.is_dir():
        return PLACE
    beside = Path(__file__).resolve().parents[2] / PLACE
    if beside.is_dir():
        return beside
    raise UserError("--report: there is no folder 'results' here; name files or folders that `bench --json` wrote")


def _runs(places: list[Path], option: str, judged: bool = False) -> tuple[list[Run], dict[str, str]]:
    from tilewise.bench.page import reading

    for place in places:
        if not place.exists():
            raise UserError(f"{option}: there is no '{place}'; expected a file or folder that `bench --json` wrote")
    runs, left_out = [], {}
    for place in places:
        try:
            found, others = reading.found([place])
        except reading.BadResultsError as error:
            raise UserError(f"{option}: '{place}' {error}") from None
        if not found and not judged:
            raise UserError(f"{option}: no results of `tilewise bench --json` in the folder '{place}'")
        runs += found
        left_out.update(others)
    return runs, left_out


def _compared(args: argparse.Namespace, runs: list[Run]) -> Comparison | None:
    if args.against is None:
        return None
    from tilewise.bench.page import against

    old, _ = _runs(args.against, "--against")
    tolerance = against.TOLERANCE if args.tolerance is None else _percent(args.tolerance)
    compared = against.compare(runs, old, tolerance, args.across_machines)
    if not compared.changes:
        raise UserError("--against: nothing to compare: no measurement is in both, by device, section, cell and name")
    print(against.text(compared))
    return compared


def _percent(text: str) -> float:
    try:
        found = float(text.removesuffix("%")) / 100
    except ValueError:
        found = -1.0
    if not 0 <= found < 10:
        raise UserError(f"--tolerance: expected a percentage from 0 to 1000, such as 5, got {text!r}")
    return found


def _plot(runs: list[Run], folder: Path) -> None:
    from tilewise.bench.page import plots
    from tilewise.cli.terminal import progress

    folder.mkdir(exist_ok=True)
    written = plots.draw(runs, folder, progress)
    progress()
    print(f"wrote {len(written)} pictures to {folder}")
