"""Training and serving on a GPU: PyTorch's operator over Triton's kernels, and what is built on it (make test-gpu)."""

from __future__ import annotations

import copy
import gc
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

import tilewise as tw
from tilewise import validate, wire
from tilewise.spec import Attention, Shape, Tile

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.triton.test_refine import count_of, visits_of  # noqa: E402 - only with both of them
from tilewise.nn import MultiHeadAttention  # noqa: E402
from tilewise.pytorch.operator import attention  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

DEVICE = "cuda"
OPTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "full": lambda draw: {},
    "causal": lambda draw: {"causal": True},
    "window, softcap": lambda draw: {"mask": tw.window(20), "score": tw.softcap(5.0)},
    "bias": lambda draw: {"score": tw.bias(draw(4, 100, 100), grad=True)},
    "bias of all": lambda draw: {"score": tw.bias(draw(100, 100), grad=True)},
    "slopes": lambda draw: {"causal": True, "score": tw.alibi(draw(4), grad=True)},
    "t5": lambda draw: {"score": tw.t5(draw(32, 4), grad=True)},
    "sinks": lambda draw: {"causal": True, "sinks": draw(4)},
    "rope": lambda draw: {"causal": True, "rope": tw.Rope()},
}


class Drawing:
    """Random numbers that remember themselves: what is drawn on the GPU has a twin in float64 on the CPU."""

    def __init__(self, dtype: Any) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._dtype = dtype
        self.here: list[Any] = []
        self.there: list[Any] = []

    def __call__(self, *shape: int, dtype: Any = torch.float32) -> Any:
        x = torch.randn(shape, generator=self._generator).to(dtype)
        self.there.append(x.double().requires_grad_())
        self.here.append(x.to(DEVICE).requires_grad_())
        return self.here[-1]

    def inputs(self, n: int = 100, heads_k: int = 2, d: int = 32) -> list[Any]:
        return [self(2, heads, n, d, dtype=self._dtype) for heads in (4, heads_k, heads_k)]


def _twin(options: Callable[[Any], dict[str, Any]], drawing: Drawing) -> dict[str, Any]:
    """The same options over the twins."""
    left = iter(drawing.there[3:])
    return options(lambda *shape: next(left))


def _off(found: Any, want: Any) -> float:
    found, want = found.detach().cpu().double(), want.detach().double()
    return float((found - want).norm() / want.norm())


@pytest.mark.parametrize("kernel", ["triton", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_everything_are_the_cpus(name: str, dtype: Any, kernel: str) -> None:
    drawing = Drawing(dtype)
    q, k, v = drawing.inputs()
    d_out = torch.randn(2, 4, 100, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = tw.attention(q, k, v, kernel=kernel, **OPTIONS[name](drawing))
    out.backward(d_out.to(DEVICE))
    want = tw.attention(*drawing.there[:3], **_twin(OPTIONS[name], drawing))
    want.backward(d_out.double())
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert _off(out, want) < limit
    for i, (here, there) in enumerate(zip(drawing.here, drawing.there, strict=True)):
        assert here.grad.dtype == here.dtype
        assert _off(here.grad, there.grad) < (limit if i < 3 else 5 * limit)  # sums of many terms of either sign


@pytest.mark.parametrize(("d", "beyond"), [(36, 0), (64, 1), (100, 0), (320, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_auto_serves_what_hoppers_kernels_do_not(d: int, beyond: int, dtype: Any) -> None:
    """Odd head dimensions, and rows that TMA cannot load: half precision by tensor cores all the same."""
    drawing = Drawing(dtype)
    here = [x[..., :d] for x in drawing.inputs(d=d + beyond)]
    there = [x[..., :d] for x in drawing.there]
    told = tw.explain(*here, causal=True)
    assert told.slowness is None and told.gradients_slowness is None
    out, want = (tw.attention(*given, causal=True) for given in (here, there))
    d_out = torch.randn(2, 4, 100, d, generator=torch.Generator().manual_seed(1)).to(dtype)
    out.backward(d_out.to(DEVICE))
    want.backward(d_out.double())
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert _off(out, want) < limit
    assert all(_off(x.grad, y.grad) < limit for x, y in zip(drawing.here, drawing.there, strict=True))


def test_packed_sequences_have_gradients() -> None:
    drawing = Drawing(torch.bfloat16)
    q, k, v = (drawing(90, 4, 32, dtype=torch.bfloat16) for _ in range(3))
    lengths = [0, 40, 40, 90]
    tw.attention_varlen(q, k, v, lengths, lengths, causal=True, kernel="triton").sum().backward()
    tw.attention_varlen(*drawing.there, lengths, lengths, causal=True).sum().backward()
    assert all(_off(x.grad, y.grad) < 2e-2 for x, y in zip(drawing.here, drawing.there, strict=True))


def test_the_same_gradients_have_the_same_bits() -> None:
    """No sum's order is left to chance."""
    found = []
    for _ in range(2):
        drawing = Drawing(torch.bfloat16)
        out = tw.attention(*drawing.inputs(700), kernel="triton", score=tw.bias(drawing(700, 700), grad=True))
        out.float().square().sum().backward()
        found.append([x.grad for x in drawing.here])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck's own: it looks at tensors that are no leaves
@pytest.mark.parametrize("name", ["full", "bias", "sinks"])
def test_opcheck(name: str) -> None:
    drawing = Drawing(torch.float32)
    call = validate.outline(*drawing.inputs(), **OPTIONS[name](drawing))
    line, given = wire.encode(call.spec, "triton")
    torch.library.opcheck(attention, (call.q, call.k, call.v, list(given), call.spec.sinks, line))


def test_a_second_derivative_is_refused() -> None:
    q, k, v = Drawing(torch.float32).inputs()
    (first,) = torch.autograd.grad(tw.attention(q, k, v, kernel="triton").sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives alone"):
        first.sum().backward()


def test_it_is_compiled_whole_and_once_for_marked_lengths() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter)
    def step(q: Any, k: Any, v: Any) -> Any:
        return tw.attention(q * 1, k, v, causal=True, kernel="triton").square().sum()

    for n in (100, 117, 130):
        q, k, v = (x.detach().requires_grad_() for x in Drawing(torch.bfloat16).inputs(n))
        for x in (q, k, v):
            torch._dynamo.mark_dynamic(x, 2)
        step(q, k, v).backward()
        want = q.grad.clone()
        q.grad = None
        tw.attention(q, k, v, causal=True, kernel="triton").square().sum().backward()
        assert _off(want, q.grad.cpu()) < 1e-2
    assert counter.frame_count == 1


def test_a_training_step_in_a_graph() -> None:
    """Forward and backward, captured together and replayed on other numbers."""
    drawing = Drawing(torch.bfloat16)
    q, k, v = drawing.inputs()
    bias = drawing(100, 100)

    def step() -> list[Any]:
        out = tw.attention(q, k, v, causal=True, score=tw.bias(bias, grad=True), kernel="triton")
        return list(torch.autograd.grad(out.float().square().sum(), (q, k, v, bias)))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            q.copy_(torch.randn_like(q))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip([x.clone() for x in found], step(), strict=True))


def _documents(n: int = 2048) -> Any:
    """Eight, of different lengths, for each of two batch indices."""
    torch.manual_seed(0)
    return torch.cat([torch.zeros(2, 1), (torch.rand(2, n - 1).argsort() < 7).cumsum(1)], 1).int()


@pytest.mark.parametrize("by_key", [False, True], ids=["by query", "by key"])
def test_a_mask_of_the_gpus_arrays_skips_as_many_tiles_as_one_of_the_cpus(by_key: bool) -> None:
    ids, shape = _documents(), Shape(2, 4, 2, 2048, 2048, 64, 64, "bfloat16", f"{DEVICE}:0")
    found, want = (
        visits_of(Attention(0.1, tw.causal() & tw.document(x)), shape, Tile(64, 64), by_key)
        for x in (ids.to(DEVICE), ids)
    )
    assert found == want
    assert count_of(found) < 2 * 528 / 3  # each batch index has 528 if none is skipped


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, of what its compiler imports
@pytest.mark.parametrize("kernel", ["triton", "auto"])
def test_gradients_under_a_mask_of_the_gpus_arrays(kernel: str) -> None:
    """Called, and compiled."""
    ids, drawing = _documents(), Drawing(torch.bfloat16)
    q, k, v = drawing.inputs(2048, d=64)

    def attend(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return tw.attention(q, k, v, mask=tw.causal() & tw.document(ids), kernel=kernel)

    d_out = torch.randn(2, 4, 2048, 64)
    want = tw.attention(*drawing.there, mask=tw.causal() & tw.document(ids))
    twins = torch.autograd.grad(want, drawing.there, d_out.double())
    for call in (attend, torch.compile(attend, fullgraph=True)):
        out = call(q, k, v, ids.to(DEVICE))
        assert _off(out, want) < 2e-2
        grads = torch.autograd.grad(out, drawing.here, d_out.to(DEVICE, torch.bfloat16))
        assert all(_off(a, b) < 2e-2 for a, b in zip(grads, twins, strict=True))


def test_a_mask_is_looked_at_in_every_replay() -> None:
    drawing, ids = Drawing(torch.bfloat16), _documents().to(DEVICE)
    q, k, v = drawing.inputs(2048, d=64)

    def step() -> list[Any]:
        out = tw.attention(q, k, v, mask=tw.causal() & tw.document(ids), kernel="triton")
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for length in (100, 1000, 2048):
        ids.copy_((torch.arange(2048, device=DEVICE) // length).int().expand(2, 2048))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip([x.clone() for x in found], step(), strict=True))


def test_autocast_is_as_in_sdpa() -> None:
    q, k, v = (x.detach() for x in Drawing(torch.float32).inputs(heads_k=4))
    with torch.autocast("cuda", torch.bfloat16):
        out = tw.attention(q, k, v, causal=True, kernel="triton")
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.dtype == want.dtype == torch.bfloat16
    assert _off(out, want.cpu()) < 1e-2


@pytest.mark.parametrize("rope", [None, tw.Rope()], ids=["plain", "rope"])
def test_a_module_and_its_cache(rope: tw.Rope | None) -> None:
    """On the GPU as on the CPU; and words that come one by one give what all at once give."""
    torch.manual_seed(0)
    there = MultiHeadAttention(64, 4, heads_k=2, rope=rope, causal=True)
    here = copy.deepcopy(there).to(DEVICE)
    x = torch.randn(2, 50, 64)
    want, got = there(x), here(x.to(DEVICE))
    assert _off(got, want) < 1e-4
    got.square().sum().backward()
    want.square().sum().backward()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert _off(a.grad, b.grad) < 1e-4
    with torch.no_grad():
        cache = here.new_cache(2, 64)
        parts = [here(x[:, i : i + 1].to(DEVICE), cache=cache) for i in range(50)]
    assert _off(torch.cat(parts, 1), want) < 1e-4


@pytest.mark.parametrize(("dtype", "kernel", "most"), [(torch.float32, "triton", 1e-5), (torch.bfloat16, "auto", 2e-2)])
def test_a_fused_projection_has_gradients(dtype: torch.dtype, kernel: str, most: float) -> None:
    drawing = Drawing(dtype)
    x, w, b = (drawing(*shape, dtype=dtype) for shape in ((2, 70, 64), (64, 128), (128,)))
    made = tw.fused_qkv_projection(x, w, b, heads=4, heads_k=2, rope=tw.Rope(), kernel=kernel)
    sum(y.float().square().sum() for y in made).backward()
    twins = tw.fused_qkv_projection(*drawing.there, heads=4, heads_k=2, rope=tw.Rope())
    sum(y.square().sum() for y in twins).backward()
    assert all(_off(a.grad, c.grad) < most for a, c in zip(drawing.here, drawing.there, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, of what its compiler imports
@pytest.mark.parametrize("rope", [tw.Rope(), tw.Rope(24, interleaved=True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_whole_tensors_are_turned(dtype: torch.dtype, rope: tw.Rope) -> None:
    """Called, compiled and captured; and its gradient."""
    x = torch.randn(2, 3, 300, 64, device=DEVICE).to(dtype).requires_grad_()
    want = tw.apply_rope(x.detach().cpu().double(), rope)
    made = tw.apply_rope(x, rope)
    assert _off(made, want) < (1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(torch.compile(lambda x: tw.apply_rope(x, rope), fullgraph=True)(x), made)
    (d_x,) = torch.autograd.grad(made, x, made.detach())
    assert _off(d_x, x.detach().cpu()) < (2e-2 if dtype == torch.bfloat16 else 1e-5)  # turned, and turned back
    graph, still = torch.cuda.CUDAGraph(), x.detach()
    with torch.cuda.graph(graph):
        captured = tw.apply_rope(still, rope)
    graph.replay()
    assert torch.equal(captured, made)


@pytest.mark.parametrize("n", [60, 300])
def test_turned_tiles_and_turned_arrays(n: int) -> None:
    """Few tiles of queries turn what they load; for many q and k are turned before."""
    drawing = Drawing(torch.bfloat16)
    sizes = (4, n), (2, 300), (2, 300)
    q, k, v = (drawing(1, heads, rows, 64, dtype=torch.bfloat16) for heads, rows in sizes)
    tw.attention(q, k, v, causal=True, rope=tw.Rope(), kernel="triton").float().square().sum().backward()
    tw.attention(*drawing.there, causal=True, rope=tw.Rope()).float().square().sum().backward()
    assert all(_off(a.grad, b.grad) < 2e-2 for a, b in zip(drawing.here, drawing.there, strict=True))


def test_the_device_of_the_arrays_need_not_be_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    q = torch.randn(1, 2, 40, 64, device="cuda:1", dtype=torch.bfloat16, requires_grad=True)
    out = tw.attention(q, q, q, causal=True, rope=tw.Rope(), kernel="triton")
    out.float().sum().backward()
    assert _off(out, tw.attention(*[q.detach().cpu()] * 3, causal=True, rope=tw.Rope())) < 2e-2


def test_gradients_are_shared_between_processes() -> None:
    """DistributedDataParallel hooks into the gradients, as soon as each is there."""
    from torch.nn.parallel import DistributedDataParallel

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        plain = MultiHeadAttention(64, 4, causal=True).to(DEVICE)
        wrapped = DistributedDataParallel(copy.deepcopy(plain))
        x = torch.randn(2, 50, 64, device=DEVICE)
        for module in (plain, wrapped):
            module(x).square().sum().backward()
        for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    finally:
        torch.distributed.destroy_process_group()


# -- memory -----------------------------------------------------------------------------------------------------------

HOPPERS = pytest.param(
    "cuda/forward_sm90",
    marks=pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU here"
    ),
)
ROOMY: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "full": lambda draw, n: {},
    "causal": lambda draw, n: {"causal": True},
    "slopes": lambda draw, n: {"causal": True, "score": tw.alibi(draw(4))},
    "relative": lambda draw, n: {"score": tw.relative(draw(4, 129))},
    "bias of keys": lambda draw, n: {"score": tw.bias(draw(1, 1, 1, n))},
    "bias of queries": lambda draw, n: {"score": tw.bias(draw(1, 1, n, 1))},
    "bias of all": lambda draw, n: {"score": tw.bias(draw(n, n))},
}


def _extra_bytes(name: str, n: int, kernel: str, grad: bool) -> int:
    """What a call and its backward pass take beyond their inputs, at most; of the second one, as plans are kept."""
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(2, 4, n, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(4))
    wanted = [x.requires_grad_() for x in (q, k, v)]

    def draw(*shape: int) -> Any:
        array = torch.rand(shape, device=DEVICE, requires_grad=grad)
        wanted.extend([array] if grad else [])
        return array

    options = ROOMY[name](draw, n)
    gc.collect()  # what tests before left must not go meanwhile
    for _ in range(2):
        torch.cuda.synchronize()
        time.sleep(0.2)  # until the thread that computed gradients has let go of them
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(tw.attention(q, k, v, **options, kernel=kernel), wanted, d_out)
    return int(torch.cuda.max_memory_allocated() - before)


@pytest.mark.parametrize("kernel", ["triton", HOPPERS])
@pytest.mark.parametrize("name", ROOMY)
def test_memory_of_a_training_step_grows_with_n(name: str, kernel: str) -> None:
    """Gradients of arrays included, on the system that has them: nowhere is a number for each query and each key."""
    grad = kernel == "triton" and name != "bias of all"
    shorter, longer = (_extra_bytes(name, n, kernel, grad) for n in (8192, 16384))
    assert longer < 2.1 * shorter + 2**20, "twice the length, twice the memory"
    assert longer < 16384**2, "less than a byte for each pair of a single head"


def test_the_gradient_of_a_bias_of_all_heads_is_one() -> None:
    """Its sums, and the array that they become, with a copy between; each of the eight heads' own would be eight."""
    assert _extra_bytes("bias of all", 4096, "triton", grad=True) < 4 * 4 * 4096**2


def test_tuning_finds_choices_that_calls_then_take(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise import cli
    from tilewise.kernels.triton import trials, tuned
    from tilewise.kernels.triton.choices import Calls, Pass

    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(trials, "_SIZES", ((64, 64), (32, 64)))  # of dozens, which take minutes to compile
    monkeypatch.setattr(trials, "_SIZES_OF_DECODING", ((64, 64),))
    monkeypatch.setattr(trials, "_STAGES", (2,))
    tuned.choices.cache_clear()
    try:
        assert cli.main(["tune", "--d", "64"]) == 0
        found = tuned.choices(f"{DEVICE}:0")
        plain = set(Pass) - {Pass.PAIRS, Pass.ARRAYS}  # which read arrays, and so are never plain
        assert set(found) == {(kind, Calls.PLAIN, 64) for kind in plain} | {(kind, Calls.MASKED, 64) for kind in Pass}
        drawing = Drawing(torch.bfloat16)
        out = tw.attention(*drawing.inputs(d=64), kernel="triton")
        assert _off(out, tw.attention(*drawing.there)) < 1e-2
        assert "tuned, plain calls on this GPU" in str(tw.explain(*drawing.here, kernel="triton"))
    finally:
        tuned.choices.cache_clear()
