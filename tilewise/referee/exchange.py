"""Runtimes that take a graph: ONNX Runtime's and OpenVINO's attention operators, forward only."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.referee.calls import Call, Inputs
from tilewise.referee.contender import CAUSAL, TOP_LEFT, Answer, Contender, Says, absent
from tilewise.referee.verdict import NAN


class Runtime(Contender):
    """On the processor; arrays are contiguous."""

    modules: tuple[str, ...]

    def missing(self, device: str) -> str | None:
        if device != "cpu":
            return f"{self.name} is judged on the processor; --device cpu"
        install = f"pip install {' '.join(self.modules)}"
        return next(filter(None, (absent(module, install) for module in self.modules)), None)

    def packages(self) -> tuple[str, ...]:
        return self.modules

    @abstractmethod
    def session(self, call: Call, given: Mapping[str, Array]) -> Callable[[], Array]: ...

    def prepare(self, call: Call, given: Inputs, device: str) -> Callable[[], Answer]:
        masks = given.bias if given.mask is None else given.mask
        named = {"q": given.q, "k": given.k, "v": given.v, **({} if masks is None else {"mask": masks})}
        run = self.session(call, {name: np.ascontiguousarray(x) for name, x in named.items()})
        return lambda: {"out": run()}


class OnnxAttention(Runtime):
    """The standard's operator; its causal mask is aligned top left, as it says."""

    name, modules = "onnxruntime", ("onnx", "onnxruntime")

    @property
    def about(self) -> str:
        return "ONNX Runtime, operator Attention of opset 23"

    def says(self, device: str) -> Says:
        arguments = (CAUSAL, TOP_LEFT, "mask", "bias", "mask beside causal", "scale", "softcap", "grouped heads")
        return Says(frozenset(arguments), ("float32", "float16"))

    def session(self, call: Call, given: Mapping[str, Array]) -> Callable[[], Array]:
        options = {"is_causal": int(bool(call.causal)), "softcap": call.softcap, "scale": call.scale}
        return _onnx("Attention", {k: v for k, v in options.items() if v is not None}, given, (23, ""))


class MultiHead(Runtime):
    """Its own operator, of (batch, n, hidden); `unidirectional` is a causal mask, and the bias is added."""

    name, modules = "onnxruntime/multihead", ("onnx", "onnxruntime")

    @property
    def about(self) -> str:
        return "ONNX Runtime, operator com.microsoft.MultiHeadAttention"

    def says(self, device: str) -> Says:
        return Says(frozenset((CAUSAL, "bias", "scale")), ("float32", "float16"))

    def session(self, call: Call, given: Mapping[str, Array]) -> Callable[[], Array]:
        options = {"num_heads": call.heads, "unidirectional": int(bool(call.causal)), "scale": call.scale}
        named = {
            name: x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1) for name, x in given.items() if name != "mask"
        }
        if "mask" in given:
            bias = given["mask"]
            named |= {
                "": np.zeros(0),
                " ": np.zeros(0),
                "mask": np.broadcast_to(bias, (*bias.shape[:2], call.n_q, call.n_k)),
            }
        run = _onnx(
            "MultiHeadAttention", {k: v for k, v in options.items() if v is not None}, named, (1, "com.microsoft")
        )
        shape = (call.batch, call.n_q, call.heads, call.d_v)
        return lambda: run().reshape(shape).swapaxes(1, 2)


def _onnx(
    operator: str, options: dict[str, Any], given: Mapping[str, Array], of: tuple[int, str]
) -> Callable[[], Array]:
    """A model of one operator; a name of spaces is an input that is left out."""
    import onnxruntime
    from onnx import TensorProto, helper

    version, domain = of
    there = {name: np.ascontiguousarray(x) for name, x in given.items() if name.strip()}
    types = {
        np.dtype(np.float32): TensorProto.FLOAT,
        np.dtype(np.float16): TensorProto.FLOAT16,
        np.dtype(bool): TensorProto.BOOL,
    }
    described = [helper.make_tensor_value_info(name, types[x.dtype], x.shape) for name, x in there.items()]
    out = helper.make_tensor_value_info("out", types[there["q"].dtype], None)
    node = helper.make_node(operator, [name.strip() for name in given], ["out"], domain=domain, **options)
    imports = [helper.make_opsetid("", 23), *([helper.make_opsetid(domain, version)] if domain else [])]
    model = helper.make_model(helper.make_graph([node], "g", described, [out]), opset_imports=imports, ir_version=10)
    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), quiet, providers=["CPUExecutionProvider"])

    def run() -> Array:
        found: Array = session.run(None, there)[0]
        return found

    return run


class OpenVino(Runtime):
    """Its mask is ignored beside causal, and rows without keys are NaN, as its pseudo-code says."""

    name, modules = "openvino", ("openvino",)

    @property
    def about(self) -> str:
        return "OpenVINO, operator ScaledDotProductAttention-13 on the CPU"

    def says(self, device: str) -> Says:
        told = (
            "the precision hint is the type of the inputs; its default takes bfloat16 for float32 on CPUs that have it"
        )
        arguments = frozenset((CAUSAL, TOP_LEFT, "mask", "bias", "scale"))
        return Says(arguments, ("float32", "float16", "bfloat16"), without_keys=NAN, notes=(told,))

    def session(self, call: Call, given: Mapping[str, Array]) -> Callable[[], Array]:
        import openvino as ov
        from openvino import opset13 as ops

        kinds = {"float32": ov.Type.f32, "float16": ov.Type.f16, "bfloat16": ov.Type.bf16, "bool": ov.Type.boolean}
        inputs = {
            name: ops.parameter(list(x.shape), kinds[arrays.dtype_name(x)], name=name) for name, x in given.items()
        }
        of_inputs = list(inputs.values())
        if call.scale is not None:
            if "mask" not in inputs:  # the scale is the input behind the mask
                of_inputs.append(ops.constant(np.zeros((1, 1, 1, 1)), kinds[call.dtype]))
            of_inputs.append(ops.constant(call.scale, kinds[call.dtype]))
        found = ops.scaled_dot_product_attention(*of_inputs, causal=bool(call.causal))
        wide = ops.convert(found, "f32")  # which holds every number of the halves
        model = ov.Model([wide], list(inputs.values()))
        core = ov.Core()
        native = call.dtype != "float16" or "FP16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        hint = kinds[call.dtype if native else "float32"]  # a hint that the processor lacks means bfloat16
        compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": hint})
        request = compiled.create_infer_request()
        fed = {name: _shared(ov, x, kinds[arrays.dtype_name(x)]) for name, x in given.items()}

        def run() -> Array:
            return np.array(request.infer(fed)[0])

        return run


def _shared(ov: Any, x: Array, kind: Any) -> Any:
    if x.dtype != arrays.BFLOAT16:
        return ov.Tensor(x)
    return ov.Tensor(x.view(np.uint16), list(x.shape), kind)


CONTENDERS = [OnnxAttention(), MultiHead(), OpenVino()]
