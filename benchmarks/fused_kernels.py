"""Count the kernels that Inductor would launch, on a machine without a GPU.

`FusedKernels` is a backend of `torch.compile`. Inductor lowers each graph and fuses it, and is then
stopped: nothing is compiled. The graph itself computes, on fake tensors. Counted are the nodes of
Inductor's scheduler after fusion, each time the graph would run: a matrix product is one, and so is
a fused loop. Bytes are the buffers that a node reads and writes; what stays inside it is free.

Inductor decides here for a CPU. For a GPU it fuses by the same rules, and may fuse more.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch._inductor.compile_fx as inductor
from torch._guards import detect_fake_mode
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._inductor.virtualized import V

from refrain.benchmarks.operations import Traffic


class FusedKernels:
    """A backend of `torch.compile` that adds each run of a graph to a `Traffic`."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Any:
        return inductor.compile_fx(graph, inputs, inner_compile=self._lower)

    def _lower(self, graph: Any, inputs: Sequence[Any], **how: Any) -> Any:
        kernels = lowered(graph, inputs, how)
        compute, traffic = torch.fx.Interpreter(graph), self._traffic

        def run(args: list[Any]) -> Any:
            given, counts = list(args), not traffic.paused
            args.clear()  # As compiled graphs do, to free them early.
            if counts:
                traffic.launches += [name for name, _ in kernels]
                traffic.num_bytes += sum(num_bytes for _, num_bytes in kernels)
            traffic.paused = True
            try:
                return compute.run(*given)
            finally:
                traffic.paused = not counts

        boxed: Any = run
        boxed._boxed_call = True
        return boxed


def lowered(graph: Any, inputs: Sequence[Any], how: dict[str, Any]) -> list[tuple[str, int]]:
    """Return name and bytes of each kernel that Inductor makes of a graph of ATen operations."""
    mode = detect_fake_mode(inputs)
    is_inference = how.get("is_inference", False)
    inductor.record_original_output_strides(graph)
    inductor.view_to_reshape(graph)
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        inductor._recursive_post_grad_passes(graph, is_inference)
        lowering = GraphLowering(
            graph,
            example_inputs=inputs,
            shape_env=mode.shape_env,
            is_inference=is_inference,
            is_backward=how.get("is_backward", False),
        )
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
            lowering.run(*inputs)
            lowering._update_scheduler()
            return [(_name(node), node.get_read_write_buffers_sizes()) for node in _real(lowering)]


def _real(lowering: GraphLowering) -> list[Any]:
    nodes = lowering.scheduler.nodes
    return [node for node in nodes if not isinstance(node, NopKernelSchedulerNode)]


def _name(node: Any) -> str:
    return node.node.python_kernel_name if node.is_extern() else "fused"
