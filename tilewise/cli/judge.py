"""`tilewise judge NAME`: the numeric contract as a referee for any attention."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import FLOAT_DTYPES, Array
from tilewise.bench import machine
from tilewise.bench.refusal import RefusedError
from tilewise.cli import UserError
from tilewise.cli.bench_options import check_writable, names, seconds, several, whole
from tilewise.cli.terminal import progress, table
from tilewise.referee import contender, results
from tilewise.referee.calls import PASSES, Call
from tilewise.referee.court import Options
from tilewise.referee.features import FEATURES, parse
from tilewise.referee.program import program
from tilewise.referee.session import Judged, sessions
from tilewise.referee.trial import Plan, Trial
from tilewise.referee.truth import truth
from tilewise.referee.verdict import CRASHED, INEXACT, REFUSED, RIGHT, WRONG, furthest

_EXAMPLES = """examples:
  tilewise judge --list                          the contenders, and which of them are here
  tilewise judge cpu                             one of our kernels, by its name
  tilewise judge sdpa/flash flex --device cuda   PyTorch's, on a GPU, each in a process of its own
  tilewise judge my_module:attention             yours: f(q, k, v, *, mask, bias, causal, scale) -> out or (out, lse)
  tilewise judge sdpa --only mask/float32/forward/8/0    one call again: docs/judge.md

Exit code 0: every answer was right, or refused; 1: something was off or crashed; 2: bad input."""
_WIDEST = 240  # letters of an error


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "judge",
        help="judge any attention by the numeric contract",
        description="Draws calls of every feature, asks a contender for those that it can be asked, and compares the "
        "answers with dense float64 attention. Contenders run in processes of their own: a crash is a result.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a contender, or MODULE:FUNCTION of your own")
    parser.add_argument("--list", action="store_true", help="the contenders and features, and what is missing here")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--calls", default="4", metavar="N", help="of each feature and pass (default: %(default)s)")
    parser.add_argument("--seed", default="0", metavar="N", help="of the first call (default: %(default)s)")
    parser.add_argument("--features", metavar="LIST", help="only these, such as causal,grouped-heads")
    parser.add_argument("--dtype", metavar="LIST", help="only these types")
    parser.add_argument("--pass", dest="passes", choices=PASSES, help="only this one (default: both)")
    parser.add_argument("--large", action="store_true", help="arrays that span gigabytes, too")
    parser.add_argument("--only", metavar="ID", help="this one call, with its numbers; an id as the report prints it")
    parser.add_argument(
        "--causal", choices=("bottom-right", "top-left"), default="bottom-right",
        help="how MODULE:FUNCTION aligns its causal mask (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--threads", metavar="N", help="of each contender's libraries (default: theirs)")
    parser.add_argument("--timeout", default="60", metavar="S", help="seconds for a call (default: %(default)s)")
    parser.add_argument("--budget", metavar="S", help="seconds after which a process asks nothing more (default: none)")
    parser.add_argument("--jobs", default="1", metavar="N", help="processes at a time (default: %(default)s)")
    parser.add_argument(
        "--split", default="1", metavar="N", help="processes that share a contender's features (default: %(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PLACE", help="a results file; a folder if there are several NAMEs"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if str(Path.cwd()) not in sys.path:  # where MODULE:FUNCTION of a user lies
        sys.path.insert(0, str(Path.cwd()))
    if args.list:
        return _list(args)
    if not args.names:
        raise UserError("NAME: expected a contender, got none; `tilewise judge --list` shows them")
    options, plan = _options(args)
    args.names = list(dict.fromkeys(args.names))
    for name in args.names:
        try:
            contender.find(name)
        except contender.UnknownContenderError as error:
            raise UserError(f"NAME: {error}") from None
    if args.only is not None:
        return _single(args, options, plan)
    places, worst = _places(args), 0
    jobs, split = whole("jobs", args.jobs), whole("split", args.split)
    for judged in sessions(args.names, options, plan, jobs, split, progress):
        progress()
        worst = max(worst, _told(judged, options, plan, places.get(judged.name)))
    return worst


def _options(args: argparse.Namespace) -> tuple[Options, Plan]:
    dtypes = _named("dtype", args.dtype, "float16,float32", FLOAT_DTYPES)
    threads = None if args.threads is None else whole("threads", args.threads)
    plan = Plan(
        count=whole("calls", args.calls),
        seed=0 if args.seed.strip("0") == "" else whole("seed", args.seed),
        features=_named("features", args.features, "causal,grouped-heads", tuple(FEATURES)),
        dtypes=dtypes,
        passes=PASSES if args.passes is None else (args.passes,),
        large=args.large,
        timeout=seconds("timeout", args.timeout),
        budget=float("inf") if args.budget is None else seconds("budget", args.budget),
    )
    return Options(args.device, args.causal.replace("-", " "), dtypes, threads), plan


def _named(option: str, text: str | None, example: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Some of those that are known; none if nothing was said."""
    return () if text is None else tuple(names(option, several(option, text, example), known))


def _places(args: argparse.Namespace) -> dict[str, Path]:
    """Where each contender's results go."""
    if args.json is None:
        return {}
    if args.json.suffix == ".json":
        if len(args.names) > 1:
            raise UserError(f"--json: expected a folder for several contenders, got '{args.json}'")
        check_writable("--json", str(args.json))
        return {args.names[0]: args.json}
    args.json.mkdir(parents=True, exist_ok=True)
    return {name: args.json / f"{_file(name)}.json" for name in args.names}


def _file(name: str) -> str:
    return "".join(x if x.isalnum() or x in "-_." else "-" for x in name)


def _list(args: argparse.Namespace) -> int:
    print(f"contenders on {args.device}; besides them any kernel by its name, and MODULE:FUNCTION of your own")
    for name, about in contender.known().items():
        reason = contender.find(name).missing(args.device)
        print(f"  {'✓' if reason is None else '✗'} {name:22} {about if reason is None else reason}")
    print("\nfeatures")
    for slug, feature in FEATURES.items():
        special = " (--large, on GPUs)" if feature.on_gpu else " (--large)" if feature.large else ""
        print(f"  {slug:26} {feature.about}{special}")
    return 0


def _told(judged: Judged, options: Options, plan: Plan, place: Path | None) -> int:
    """The report of a contender, printed and kept; the exit code for it."""
    if judged.introduction.missing is not None:
        print(f"{judged.name}: not here: {judged.introduction.missing}")
        return 2
    found = results.results(judged, options, plan, machine.describe(options.device, options.threads))
    if place is not None:
        place.write_text(json.dumps(found, indent=1) + "\n")
    print(_report(found))
    count = results.total(found)
    return 1 if count[WRONG] or count[CRASHED] or count[INEXACT] else 0


# -- what is printed --------------------------------------------------------------------------------------------------


def _report(found: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {x}" for name, x in found["versions"].items())
    lines = [f"{found['contender']} on {found['device']}: {found['about']}" + (f" ({versions})" if versions else "")]
    lines += [f"note: {note}" for note in found["notes"]]
    lines += [] if found["complete"] else ["note: its --budget was spent before all calls were asked"]
    rows = [(r["feature"], r["pass"], results.counted(r)) for r in found["records"]]
    lines.append(_left(("feature", "pass", "calls"), rows))
    lines += _refusals(found)
    lines += [_fault(found, fault) for fault in found["faults"]]
    told = ", ".join(f"{n} {what}" for what, n in results.total(found).items() if n)
    return "\n".join([*lines, f"{found['contender']}: {told}\n"])


def _refusals(found: Mapping[str, Any]) -> list[str]:
    """Each reason once, with the features that it was given for."""
    reasons: dict[str, list[str]] = {}
    for r in found["records"]:
        for reason in r["reasons"] if r[REFUSED] else ():
            reasons.setdefault(reason[:_WIDEST], []).append(r["feature"])
    told = (f"  {reason}\n    in {', '.join(dict.fromkeys(features))}" for reason, features in reasons.items())
    return ["\nrefused:", *told] if reasons else []


def _left(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose every column stands to the left."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    return "\n".join(
        "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)
    )


def _fault(found: Mapping[str, Any], fault: Mapping[str, Any]) -> str:
    return "\n".join([
        f"\n{fault['feature']}, {fault['pass']}: {results.fault_line(fault)}",
        f"  {fault['call']}",
        f"  {command(found, fault['id'])}",
    ])  # fmt: skip


def command(found: Mapping[str, Any], call: str) -> str:
    """The line that shows a call again."""
    device = "" if found["device"] == "cpu" else f" --device {found['device']}"
    own = ":" in found["contender"] and found["options"]["causal"] != "bottom right"
    causal = f" --causal {found['options']['causal'].replace(' ', '-')}" if own else ""
    return f"tilewise judge {found['contender']}{device}{causal} --only {call}"


# -- one call ---------------------------------------------------------------------------------------------------------


def _single(args: argparse.Namespace, options: Options, plan: Plan) -> int:
    try:
        call = parse(args.only)
    except ValueError as error:
        raise UserError(f"--only: {error}") from None
    worst = 0
    for name in args.names:
        with Trial(name, options, plan) as trial:
            if trial.introduction.missing is not None:
                raise UserError(f"{name}: {trial.introduction.missing}")
            try:
                heard, said = trial.hear_all(call)
            except RefusedError as error:
                raise UserError(f"{name}: {error}") from None
        found = heard.finding
        print(f"{name}, {heard.what}: {call.describe()}")
        print(f"{found.verdict}{f': {found}' if str(found) else ''}")
        if said is not None:
            head = ("result", "largest error", "allowed", "at", "found", "expected")
            print(table(head, _numbers(args.only, said.answer)))
        if found.differs:
            print(f"other bits the second time: {', '.join(found.differs)}")
        if said is not None and found.verdict != RIGHT and found.what in said.answer:
            _show_program(name, args, call, found.what, said.answer[found.what])
        worst = max(worst, int(found.verdict != RIGHT or bool(found.differs)))
    return worst


def _numbers(call: str, answer: Mapping[str, Array]) -> list[tuple[str, ...]]:
    """Of each result the place that is furthest off."""
    rows: list[tuple[str, ...]] = []
    for what, got in answer.items():
        want, values = truth(call).expected[what], arrays.widen(arrays.as_numpy(got), np.float64)
        if values.shape != want.exact.shape or not values.size:
            rows.append((what, "", f"{want.limit:.2g}", str(values.shape), "", str(want.exact.shape)))
            continue
        at, off = furthest(want, values)
        numbers = f"{off:.3g}", f"{want.limit:.3g}", str(list(at)), f"{values[at]:.6g}", f"{want.exact[at]:.6g}"
        rows.append((what, *numbers))
    return rows


def _show_program(name: str, args: argparse.Namespace, call: Call, what: str, got: Array) -> None:
    values, want = arrays.widen(arrays.as_numpy(got), np.float64), truth(call.id).expected[what]
    if values.shape != want.exact.shape:
        return
    code = contender.find(name).code(call)
    text = program(call, code, args.device, what, furthest(want, values)[0])
    if text is not None:
        print(f"\nthe same without tilewise:\n\n{text}")
