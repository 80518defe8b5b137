"""Linear attention: what it computes, that it is right, and what it saves. `python examples/linear_attention.py --help`

Every ✓ was checked just now. Needs NumPy alone; with PyTorch and a GPU all of it runs there as well.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import time
from typing import Any

import numpy as np

import tilewise as tw


def check(what: str, got: Any, want: Any, tolerance: float = 1e-4) -> None:
    got, want = on_host(got), on_host(want)
    error = float(np.abs(got - want).max() / np.abs(want).max())
    if error > tolerance:
        raise SystemExit(f"✗ {what}: off by {error:.1e}")
    print(f"✓ {what} (off by {error:.0e})")


def on_host(x: Any) -> Any:
    return x.cpu().numpy() if hasattr(x, "cpu") else x


def by_definition(q: Any, k: Any, v: Any) -> Any:
    """The N x N matrix of weights, as no kernel has it."""
    features = [np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k)]
    weights = np.tril(features[0] @ features[1].swapaxes(-1, -2))
    return weights @ v / weights.sum(-1, keepdims=True)


def correctness(library: Any = np, device: str = "cpu") -> None:
    def there(x: Any) -> Any:
        return x if library is np else library.from_numpy(x).to(device)

    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, 2, 4, 300, 32)).astype(np.float32)  # (batch, heads, n, d)
    q, k, v = map(there, rows)
    out, state = tw.linear_attention(q, k, v, return_state=True)
    check("causal linear attention is its definition", out, by_definition(*rows))

    first = [x[:, :, :200] for x in (q, k, v)]
    _, carried = tw.linear_attention(*first, return_state=True)
    steps = []
    for i in range(200, 300):  # generating text: a token at a time, with a state that does not grow
        token = [x[:, :, i : i + 1] for x in (q, k, v)]
        step, carried = tw.linear_attention(*token, initial_state=carried, return_state=True)
        steps.append(on_host(step))
    check("100 tokens one by one are the same tokens at once", np.concatenate(steps, axis=2), out[:, :, 200:])
    check("and leave the same state", carried.kv, state.kv)

    halves = [tw.linear_attention(*(x[:, :, part] for x in (q, k, v)), return_state=True)[1]
              for part in (slice(0, 120), slice(120, 300))]  # fmt: skip
    check("states of two halves, computed apart, combine", halves[0].then(halves[1]).kv, state.kv)

    gates = there(np.log(rng.uniform(0.8, 1.0, (2, 4, 300))).astype(np.float32))
    out, _, pullback = tw.linear_attention_vjp(q, k, v, decay=gates)
    moved = tw.linear_attention(q, k, v, decay=gates * 1.001)
    check(
        "the gradient of a decay is a difference",
        (pullback(out).decay * gates).sum() * 1e-3, ((moved - out) * out).sum(), 2e-2,
    )  # fmt: skip
    own = tw.linear_attention(q, k, v, feature_map=tw.where(tw.S > 0, tw.S + 1, tw.exp(tw.S)))
    check("a feature map of one's own reaches every kernel", own, tw.linear_attention(q, k, v))


def comparison(lengths: list[int]) -> None:
    library, device = where_to_compute()
    print(f"\n1 sequence, 8 heads, d 64, float32 on the CPU, bfloat16 on a GPU; on {device}:")
    print(
        f"{'n':>7}  {'standard ms':>11}  {'softmax ms':>10}  {'linear ms':>9}  {'speed-up':>8}  memory: matrix / state"
    )
    for n in lengths:
        q, k, v = _arrays(library, device, n)
        standard = _milliseconds(lambda q=q, k=k, v=v: _standard(library, q, k, v), device)
        softmax = _milliseconds(lambda q=q, k=k, v=v: tw.attention(q, k, v, causal=True), device)
        linear = _milliseconds(lambda q=q, k=k, v=v: tw.linear_attention(q, k, v), device)
        matrix, state = 8 * n * n * 4, 8 * (64 * 64 + 64) * 4
        print(
            f"{n:>7}  {standard:>11.2f}  {softmax:>10.2f}  {linear:>9.2f}  {standard / linear:>7.1f}x  "
            f"{matrix / 2**20:.0f} MiB / {state / 2**10:.0f} KiB"
        )
    print("standard: the whole N x N matrix of scores and their softmax; softmax: tw.attention, exact, tile by tile.")
    print("speed-up: of linear attention over standard attention.")


def whole_numbers(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", text):
        raise argparse.ArgumentTypeError(f"expected whole numbers such as 512,1024, got {text!r}")
    return [int(n) for n in text.split(",")]


def where_to_compute() -> tuple[Any, str]:
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return torch, "cuda"
    return np, "cpu"


def _arrays(library: Any, device: str, n: int) -> list[Any]:
    if library is np:
        return list(np.random.default_rng(1).standard_normal((3, 1, 8, n, 64)).astype(np.float32))
    return [library.randn(1, 8, n, 64, device=device, dtype=library.bfloat16) for _ in range(3)]


def _standard(library: Any, q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.swapaxes(-1, -2) / 8.0
    scores = scores + library.triu(library.full_like(scores[0, 0], -float("inf")), 1)
    weights = library.exp(scores - scores.max(-1, keepdims=True) if library is np else scores - scores.amax(-1, True))
    return weights / weights.sum(-1)[..., None] @ v


def _milliseconds(call: Any, device: str) -> float:
    call()  # compiles, and makes memory and threads ready
    best = float("inf")
    for _ in range(5):
        if device == "cuda":
            sys.modules["torch"].cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device == "cuda":
            sys.modules["torch"].cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best * 1e3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024,2048,4096", type=whole_numbers,
                        help="of sequences that are timed (%(default)s)")  # fmt: skip
    lengths = parser.parse_args().lengths
    correctness()
    library, device = where_to_compute()
    if device != "cpu":
        print(f"\nOn {device}:")
        correctness(library, device)
    comparison(lengths)
