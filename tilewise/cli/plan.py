"""`tilewise plan`: which tiles an attention visits, as numbers and a map."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from tilewise import schedule
from tilewise.arrays import FLOAT_DTYPES
from tilewise.cli import UserError, plan_arch
from tilewise.explanation import describe, describe_kept, describe_plan, kept_for_backward, tile_map
from tilewise.schedule import Kind, Plan
from tilewise.spec import Attention, Shape, Tile
from tilewise.text import ExpressionError, parse
from tilewise.validate import check_variant, mask_expression, score_expression
from tilewise.walking import nodes

MAX_TILES = 10**8  # of all sequences and heads that a plan tells apart: what takes time
MAX_ROWS = 10**6  # of tiles, likewise: each has an entry
MAX_NUMBERS = 10**8  # operations of the expression, times the tiles that are classified together: what takes memory
MAX_SIZE = 2**31 - 1

_EXAMPLES = """examples:
  tilewise plan --mask "causal() & window(512)" --n 8192 --block 128
  tilewise plan --mask "(Q - K < 128) | (K < 4)" --n 2048
  tilewise plan --mask "document([0, 0, 0, 1, 1, 1])" --n 6 --block 2
  tilewise plan --score "softcap(30.0) >> alibi(8)" --heads 8 --n 4096
  tilewise plan --arch all --d 128
  tilewise plan --arch sm_80 --block 128x64

Expressions know the variables S B H HK Q K NQ NK, the operators + - * / // % < <= > >= == != & | ~ >>,
abs min max where exp log tanh, lists of numbers as arrays, and the named variants. They are parsed, never run."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="which tiles an attention visits, as numbers and a map",
        description="Classifies the tiles of an attention as EMPTY (skipped), PARTIAL (masked) or FULL (no mask code), "
        "and shows what they cost.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mask", metavar="TEXT", help="the mask, such as 'causal() & window(512)' (default: none)")
    parser.add_argument("--score", metavar="TEXT", help="the score, such as 'softcap(30.0)' (default: S)")
    parser.add_argument("--n", type=int, default=1024, help="queries and keys (default: %(default)s)")
    parser.add_argument("--n-q", type=int, metavar="N", help="queries, if not --n")
    parser.add_argument("--n-k", type=int, metavar="N", help="keys, if not --n")
    parser.add_argument("--block", metavar="SIZE", help="tile size: 128, or 64x128 (queries x keys) (default: 128)")
    parser.add_argument("--d", type=int, default=64, help="head dimension (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--heads", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--heads-k", type=int, metavar="N", help="key heads, if fewer than --heads")
    parser.add_argument("--dtype", default="bfloat16", choices=FLOAT_DTYPES, help="(default: %(default)s)")
    parser.add_argument("--head", type=int, default=0, metavar="H", help="the head whose map is shown (default: 0)")
    parser.add_argument(
        "--arch",
        help="instead: which tiles fit the shared memory of a GPU such as sm_90 (H100), or of all generations (all)",
    )
    parser.add_argument("--json", action="store_true", help="the numbers as JSON, without the map")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    shape, tile = _shape(args), tile_of(args.block or "128", "--block")
    if args.arch is not None:
        if args.mask is not None or args.score is not None:
            raise UserError(
                "--arch: what tiles take is the same for every --mask and --score; leave these out, or --arch"
            )
        return plan_arch.run(args.arch, shape, plan_arch.TILES if args.block is None else (tile,), args.json)
    spec = with_expression(Attention(shape.d**-0.5), shape, "mask", args.mask, "--mask")
    spec = with_expression(spec, shape, "score", args.score, "--score")
    plan = schedule.plan(spec, shape, tile)
    check_plan(plan, "--block")
    if args.json:
        print(json.dumps(_numbers(plan), indent=2))
        return 0
    print(describe(spec, shape))
    print(describe_plan(plan))
    print(describe_kept(shape))
    print(f"\n{tile_map(plan, 0, args.head)}")
    return 0


def with_expression(spec: Attention, shape: Shape, kind: str, text: str | None, label: str) -> Attention:
    """The attention with a mask or a score, whose arrays fit the shape. label: what errors call it."""
    if text is None:
        return spec
    try:
        expr = parse(text)
        one = {"mask": mask_expression(expr)} if kind == "mask" else {"score": score_expression(expr)}
        spec = replace(spec, **one)
        check_variant(spec, shape)
    except (ExpressionError, TypeError, ValueError) as error:
        raise UserError(f"{label}: {error}") from error
    return spec


def check_plan(plan: Plan, label: str) -> None:
    """Refuse a plan that would take minutes or gigabytes to make, before it is made. label: what errors call tiles."""
    (rows, columns), (batches, heads) = plan.grid, plan.told_apart
    told = f"{plan.tile.q} x {plan.tile.k} makes {rows} x {columns} tiles"
    if batches * heads > 1:
        told += f" for each of {batches * heads} (sequence, head) pairs, which the expression tells apart"
    if batches * heads * rows * columns > MAX_TILES or batches * heads * rows > MAX_ROWS:
        limits = f"{MAX_TILES:,} tiles in {MAX_ROWS:,} rows are the most"
        raise UserError(f"{label}: {told}; {limits}: take larger tiles, or fewer heads")
    operations = 0 if plan.live is None else len(nodes(plan.live))
    if plan.at_once * operations > MAX_NUMBERS:
        told = f"{told}, too many for an expression of {operations} operations"
        raise UserError(f"{label}: {told}; take larger tiles, fewer heads, or a shorter expression")


def _shape(args: argparse.Namespace) -> Shape:
    n_q = args.n if args.n_q is None else args.n_q
    n_k = args.n if args.n_k is None else args.n_k
    heads_k = args.heads if args.heads_k is None else args.heads_k
    for name, value, least in (
        ("--n", min(n_q, n_k), 0), ("--n", max(n_q, n_k), 0), ("--d", args.d, 1), ("--batch", args.batch, 1),
        ("--heads", args.heads, 1), ("--heads-k", heads_k, 1),
    ):  # fmt: skip
        if value < least:
            raise UserError(f"{name}: expected at least {least}, got {value}")
        if value > MAX_SIZE:
            raise UserError(f"{name}: expected at most {MAX_SIZE}, got {value}")
    if args.heads % heads_k:
        raise UserError(f"--heads-k: expected a divisor of --heads {args.heads}, got {heads_k}")
    if not 0 <= args.head < args.heads:
        raise UserError(f"--head: expected 0 to {args.heads - 1}, got {args.head}")
    return Shape(args.batch, args.heads, heads_k, n_q, n_k, args.d, args.d, args.dtype)


def tile_of(text: str, label: str) -> Tile:
    """128, or 64x128."""
    try:
        sizes = [int(part) for part in text.lower().split("x")]
        if len(sizes) > 2:
            raise ValueError
        return Tile(sizes[0], sizes[-1])
    except ValueError:
        raise UserError(f"{label}: expected a size such as 128 or 64x128, got {text!r}") from None


def _numbers(plan: Plan) -> dict[str, Any]:
    return {
        "grid": plan.grid,
        "tiles": {kind.name: plan.counts[kind] for kind in Kind},
        "flops": plan.flops,
        "flops_naive": plan.flops_naive,
        "bytes_tiled": plan.bytes_tiled,
        "bytes_naive": plan.bytes_naive,
        "bytes_matrix": plan.bytes_matrix,
        "bytes_on_chip": plan.bytes_on_chip,
        "bytes_kept": kept_for_backward(plan.shape),
    }
