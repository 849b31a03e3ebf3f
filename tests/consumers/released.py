"""Released programs that import `deep_ep`, as `make test-consumers` unpacks them, on CPU ranks with hybrid_ep under it.

Nothing is copied: a wheel's files are imported from where they were unpacked. Parts of their packages that no test uses
are stubs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.battery.cases import Case
from tests.battery.signals import blocks_of, late_experts

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = REPOSITORY / "out" / "consumers"


def _import_from(package: str) -> None:
    """Makes a package that was unpacked, and `deep_ep`, importable."""
    os.environ["HYBRID_EP_ELASTIC_BUFFER"] = "on"
    for path in (ROOT / package, REPOSITORY / "compat" / "deep_ep"):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))


def _case() -> Case:
    return Case("consumer", dist.get_world_size(), 24, topk=2, num_experts=8)


def _dense(case: Case, rank: int) -> torch.Tensor:
    """Σ weight × (expert + 1) × x."""
    inputs = case.inputs(rank)
    return inputs.x.double() * (inputs.topk_weights.double() * (inputs.topk_idx + 1)).sum(1, keepdim=True)


def _times_expert(tokens: torch.Tensor, counts: Sequence[int], weights: torch.Tensor) -> torch.Tensor:
    """What the experts of this rank make of rows by expert: (expert + 1) × weight × row."""
    num_local = len(counts)
    numbers = torch.arange(num_local) + dist.get_rank() * num_local + 1
    factors = torch.repeat_interleave(numbers, torch.tensor(counts))
    return (tokens.float() * (factors * weights).unsqueeze(1)).to(tokens.dtype)


class _OnCpu(TorchFunctionMode):
    """Tensors that a program makes on the GPU by name are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def check_megatron(backend: str) -> None:
    """Its flex dispatcher, forward and backward, against a dense mixture."""
    _import_from("megatron-core")
    import torch._dynamo

    if importlib.util.find_spec("triton") is None:
        # Kernels of something else, which its dispatcher's neighbours import from 0.19 on.
        sys.modules["megatron.core.transformer.moe.ops.paged_stash"] = MagicMock()

    torch._dynamo.config.disable = True  # it compiles a reshape, which takes longer than all the rest
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    rank, case = dist.get_rank(), _case()
    inputs, num_local = case.inputs(rank), case.num_experts // case.num_ranks
    alone = [dist.new_group([r]) for r in range(case.num_ranks)][rank]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.hidden,
        num_attention_heads=4,
        num_moe_experts=case.num_experts,
        moe_router_topk=case.topk,
        expert_model_parallel_size=case.num_ranks,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend=backend,
        moe_router_dtype="fp32",
    )
    groups = SimpleNamespace(ep=dist.group.WORLD, expt_tp=alone, tp_ep=dist.group.WORLD)
    local = list(range(rank * num_local, (rank + 1) * num_local))
    with _OnCpu():
        dispatcher = MoEFlexTokenDispatcher(num_local, local, config, pg_collection=groups)
    routing_map = torch.zeros(case.tokens_of(rank), case.num_experts, dtype=torch.bool).scatter_(
        1, inputs.topk_idx, True
    )
    probs = torch.zeros(routing_map.shape).scatter_(1, inputs.topk_idx, inputs.topk_weights).requires_grad_()
    x = inputs.x.clone().requires_grad_()
    hidden, token_probs = dispatcher.dispatch_preprocess(x, routing_map, probs)
    hidden, dispatched_probs = dispatcher.token_dispatch(hidden, token_probs)
    tokens, counts, permuted_probs = dispatcher.dispatch_postprocess(hidden, dispatched_probs)
    y = dispatcher.combine_preprocess(_times_expert(tokens, counts.tolist(), permuted_probs))
    y = dispatcher.combine_postprocess(dispatcher.token_combine(y))
    want = _dense(case, rank)
    torch.testing.assert_close(y.double(), want, rtol=2**-6, atol=2**-6)
    y.float().sum().backward()
    assert x.grad is not None
    factors = (inputs.topk_weights * (inputs.topk_idx + 1)).sum(1, keepdim=True).expand_as(x)
    torch.testing.assert_close(x.grad.float(), factors, rtol=2**-6, atol=2**-6)
    assert probs.grad is not None
    sums = inputs.x.float().sum(1, keepdim=True) * (inputs.topk_idx + 1)
    torch.testing.assert_close(probs.grad.gather(1, inputs.topk_idx), sums, rtol=2**-5, atol=2**-3)


def check_nemo(is_bounded: bool) -> None:
    """Its functions for Hybrid-EP, with compact routing: indices beside dense probabilities, and their gradient."""
    module = _module_of("nemo-automodel", "nemo_automodel.components.moe.megatron.fused_a2a")
    rank, case = dist.get_rank(), _case()
    inputs, num_local = case.inputs(rank), case.num_experts // case.num_ranks
    probs = torch.zeros(len(inputs.x), case.num_experts).scatter_(1, inputs.topk_idx, inputs.topk_weights)
    probs.requires_grad_()
    x = inputs.x.clone().requires_grad_()
    bound = case.max_tokens * case.num_ranks * case.topk if is_bounded else None
    options = {"topk_idx": inputs.topk_idx.short(), "num_experts": case.num_experts}
    with patch.object(torch.cuda, "synchronize"):  # which it calls after the first dispatch
        rows, row_probs, _, counts, handle = module.hybrid_ep_dispatch(
            x, None, probs, dist.group.WORLD, num_local, num_permuted_tokens=bound, **options
        )
    used = int(counts.sum())
    y = _times_expert(rows[:used], counts.tolist(), row_probs[:used])
    y = torch.cat([y, y.new_zeros(len(rows) - used, case.hidden)])
    combined = module.hybrid_ep_combine(y, handle, num_permuted_tokens=bound)
    torch.testing.assert_close(combined.double(), _dense(case, rank), rtol=2**-6, atol=2**-5)
    combined.float().sum().backward()
    assert probs.grad is not None
    sums = inputs.x.float().sum(1, keepdim=True) * (inputs.topk_idx + 1)
    torch.testing.assert_close(probs.grad.gather(1, inputs.topk_idx), sums, rtol=2**-5, atol=2**-3)


def _module_of(release: str, name: str) -> Any:
    """Imports one module of a release, with stubs for the rest of its package."""
    _import_from(release)
    if name not in sys.modules:
        file = ROOT / release / Path(*name.split(".")).with_suffix(".py")
        sys.meta_path.insert(0, _Stubs(name.partition(".")[0], {name: file}))
    return importlib.import_module(name)


class _Stubs(MetaPathFinder, Loader):
    """Imports stubs for a package, but for the modules that are asked for, which are the package's own."""

    def __init__(self, package: str, real: dict[str, Path]) -> None:
        self._package, self._real = package, real

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._package and not name.startswith(f"{self._package}."):
            return None
        spec = ModuleSpec(name, self, is_package=name not in self._real)
        if name in self._real:
            spec.origin, spec.has_location = str(self._real[name]), True
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.name in self._real:
            return None
        stub: Any = MagicMock(name=spec.name)
        stub.__path__, stub.__spec__ = [], spec
        return stub  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        path = self._real.get(module.__name__)
        if path is not None:
            exec(compile(path.read_text(), str(path), "exec"), module.__dict__)


def _import_sglang(part: str) -> Any:
    """One of its dispatchers."""
    _import_from("sglang")
    folder = ROOT / "sglang" / "sglang" / "srt" / "layers" / "moe" / "token_dispatcher"
    name = "sglang.srt.layers.moe.token_dispatcher"
    if name not in sys.modules:
        parts = ("base", "deepep", "deepep_v2")
        sys.meta_path.insert(0, _Stubs("sglang", {f"{name}.{file}": folder / f"{file}.py" for file in parts}))
    utils: Any = __import__("sglang.srt.utils", fromlist=["utils"])
    utils.is_npu = lambda: False
    return __import__(f"{name}.{part}", fromlist=[part])


def check_sglang_normal(is_async: bool) -> None:
    """Its dispatcher for DeepEP V1 in prefill: rows by source, with local experts."""
    module = _import_sglang("deepep")
    module.deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = True  # combine takes rows of no other experts
    module._is_npu = False
    module._deepep_precompile_tp_barrier = lambda: None
    module.DeepEPConfig._instance = SimpleNamespace(normal_dispatch_config=None, normal_combine_config=None)
    rank, case = dist.get_rank(), _case()
    inputs, first = case.inputs(rank), rank * case.num_experts // case.num_ranks
    buffer = module.Buffer(dist.group.WORLD, 1 << 20, 0)
    made = object.__new__(module._DeepEPDispatcherImplNormal)
    made.async_finish, made.use_fp8, made.num_experts, made._get_buffer = (
        is_async,
        False,
        case.num_experts,
        lambda: buffer,
    )
    topk = SimpleNamespace(topk_ids=inputs.topk_idx.to(torch.int32), topk_weights=inputs.topk_weights)
    for _ in range(2):
        sent = made.dispatch_b(*made.dispatch_a(inputs.x, topk))
        assert all(count % 128 == 0 for count in sent.num_recv_tokens_per_expert)
        factors = torch.where(sent.topk_ids >= 0, sent.topk_weights * (sent.topk_ids + first + 1), 0.0)
        y = (sent.hidden_states.float() * factors.sum(1, keepdim=True)).to(torch.bfloat16)
        combined = made.combine_b(*made.combine_a(y, sent.topk_ids, sent.topk_weights))
        torch.testing.assert_close(combined.double(), _dense(case, rank), rtol=2**-6, atol=2**-5)
    buffer.destroy()


def check_sglang_overlap(is_blackwell: bool) -> None:
    """Its low-latency dispatcher with single-batch overlap: combine is called while experts still write."""
    module = _import_sglang("deepep")
    module.is_blackwell = lambda: is_blackwell
    module._deepep_precompile_tp_barrier = lambda: None
    rank, case = dist.get_rank(), _case()
    inputs, capacity = case.inputs(rank), case.max_tokens * case.num_ranks
    num_local, threshold, block_m = case.num_experts // case.num_ranks, 3, capacity if is_blackwell else 64
    buffer = module.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, num_qps_per_rank=num_local)
    made = object.__new__(module._DeepEPDispatcherImplLowLatency)
    made.return_recv_hook, made.quant_config, made.use_fp8, made.use_nvfp4 = True, {}, False, False
    made.num_max_dispatch_tokens_per_rank, made.num_experts = case.max_tokens, case.num_experts
    made.device_module, made._get_buffer = torch.cpu, lambda: buffer
    made.meta_overlap_args = {"block_m": block_m, "threshold": threshold}
    topk = SimpleNamespace(topk_ids=inputs.topk_idx, topk_weights=inputs.topk_weights)
    stream = SimpleNamespace(wait_event=lambda _: None, wait_stream=lambda _: None)
    for _ in range(2):
        made.overlap_args = None
        sent = made.dispatch_b(*made.dispatch_a(inputs.x, topk))
        numbers = torch.arange(rank * num_local, (rank + 1) * num_local).view(-1, 1, 1) + 1
        is_row = torch.arange(capacity) < sent.masked_m.unsqueeze(1)
        y = torch.where(is_row.unsqueeze(2), sent.hidden_states.float() * numbers, float("nan")).to(torch.bfloat16)
        num_signals = num_local * -(-capacity // block_m)
        with late_experts(y, num_signals, blocks_of(case, rank, block_m), threshold, 0.1, "cpu") as (x, signals):
            made.overlap_args = SimpleNamespace(
                overlap=True,
                stream=stream,
                wait_event=None,
                signal=signals.view(torch.uint32) if is_blackwell else signals,
                threshold=threshold,
                num_sms=3,
            )
            combined = made.combine_b(*made.combine_a(x, sent.topk_ids, sent.topk_weights))
        torch.testing.assert_close(combined.double(), _dense(case, rank), rtol=2**-6, atol=2**-5)
    buffer.destroy()


def check_sglang(is_decode: bool) -> None:
    """Its dispatcher for DeepEP V2, in prefill and in decode steps, against a dense mixture."""
    module = _import_sglang("deepep_v2")
    rank, case = dist.get_rank(), _case()
    inputs = case.inputs(rank)
    module.envs = SimpleNamespace(
        SGLANG_DEEPEP_V2_NUM_SMS=SimpleNamespace(get=lambda: 0),
        SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND=SimpleNamespace(get=lambda: True),
    )
    module.get_is_extend_in_batch = lambda: not is_decode
    module.get_parallel = lambda: SimpleNamespace(attn_dp_size=2, attn_cp_size=1, tp_size=1, tp_group=None)
    module._get_allow_hybrid_mode = lambda: False
    state = SimpleNamespace(buffer=None, key=None)
    module.DeepEPv2Buffer._state = classmethod(lambda _: state)
    scale_format = SimpleNamespace(ue8m0=False, tma_aligned=False)
    num_local = case.num_experts // case.num_ranks
    made = module._DeepEPv2Impl(
        dist.group.WORLD, case.topk, case.num_experts, num_local, case.hidden, scale_format, 32, use_fp8_dispatch=False
    )
    topk = SimpleNamespace(topk_ids=inputs.topk_idx.to(torch.int32), topk_weights=inputs.topk_weights)
    for _ in range(2):
        sent = made.dispatch(inputs.x, topk)
        ends = sent.psum_num_recv_tokens_per_expert.tolist()
        y = torch.zeros_like(sent.hidden_states)
        begin = 0
        for local, end in enumerate(ends):
            rows = slice(begin, end)
            weights = sent.topk_weights[rows]
            y[rows] = (sent.hidden_states[rows].float() * (weights * (rank * num_local + local + 1)).unsqueeze(1)).to(
                y.dtype
            )
            begin = -(-end // sent.expert_alignment) * sent.expert_alignment
        combined = made.combine(SimpleNamespace(hidden_states=y, topk_weights=None, routewise_layout=None))
        torch.testing.assert_close(combined.double(), _dense(case, rank), rtol=2**-6, atol=2**-5)
    assert state.buffer is not None
    state.buffer.close()


def _import_torchtitan(part: str) -> Any:
    """Its operators for one of the interfaces, on CPU tensors too."""
    _import_from("torchtitan")
    name = "torchtitan.distributed.deepep"
    folder = ROOT / "torchtitan" / "torchtitan" / "distributed" / "deepep"
    if name not in sys.modules:
        files = {f"{name}.{file}": folder / f"{file}.py" for file in ("deepep", "hybridep")}
        sys.meta_path.insert(0, _Stubs("torchtitan", files))
    is_new = f"{name}.{part}" not in sys.modules
    import torch._library.opaque_object as opaque_object

    if not hasattr(opaque_object, "CustomClassBase"):  # its name after torch 2.13
        opaque_object.CustomClassBase = opaque_object.OpaqueBase  # type: ignore[attr-defined]
    module: Any = __import__(f"{name}.{part}", fromlist=[part])
    if is_new and part == "deepep":
        module._lib.impl("dispatch", module._dispatch_op_impl, "CPU")
        module._lib.impl("combine", module._combine_op_impl, "CPU")
    elif is_new:
        for operator in (
            module._dispatch_impl,
            module._combine_impl,
            module._dispatch_bwd_impl,
            module._combine_bwd_impl,
        ):
            operator.register_kernel("cpu")(operator._init_fn)
    return module


def check_torchtitan(backend: str, is_training: bool) -> None:
    """Its dispatcher against a dense mixture: with a backward pass, and without it a number of rows that is fixed."""
    module = _import_torchtitan(backend)
    rank, case = dist.get_rank(), replace(_case(), tokens=24)
    inputs, num_local = case.inputs(rank), case.num_experts // case.num_ranks
    x, scores = inputs.x.clone().requires_grad_(is_training), inputs.topk_weights.clone().requires_grad_(is_training)
    tokens = (x, inputs.topk_idx, scores, num_local, case.num_experts)
    if backend == "deepep":
        module.get_buffer(dist.group.WORLD, hidden=case.hidden, num_max_tokens_per_rank=64, num_topk=case.topk)
    else:
        module.get_buffer(dist.group.WORLD, case.hidden, case.max_tokens, num_local)
    for _ in range(2):
        with torch.set_grad_enabled(is_training):
            if backend == "deepep":
                options = {
                    "num_tokens_per_rank": case.max_tokens,
                    "cudagraphable": True,
                }  # False where gradients are on
            else:
                factor = None if is_training else 1.0
                options = {"group": dist.group.WORLD, "non_blocking_expert_capacity_factor": factor}
            rows, counts, state = module.dispatch_tokens(*tokens, **options)
            if not is_training:
                assert len(rows) > counts.sum(), "the number of rows does not follow the routing"
            used = int(counts.sum())
            y = _times_expert(rows[:used], counts.tolist(), torch.ones(used))
            y = torch.cat([y, torch.zeros(len(rows) - used, case.hidden, dtype=y.dtype)])
            combined = module.combine_tokens(y, state)
            if backend == "deepep":
                module.sync_combine()
        torch.testing.assert_close(combined.double(), _dense(case, rank), rtol=2**-6, atol=2**-5)
        if is_training:
            x.grad = scores.grad = None
            combined.float().sum().backward()
            assert x.grad is not None
            assert scores.grad is not None
            factors = (inputs.topk_weights * (inputs.topk_idx + 1)).sum(1, keepdim=True).expand_as(x)
            torch.testing.assert_close(x.grad.float(), factors, rtol=2**-5, atol=2**-5)
            sums = inputs.x.float().sum(1, keepdim=True) * (inputs.topk_idx + 1)
            torch.testing.assert_close(scores.grad, sums, rtol=2**-4, atol=2**-1)
    module._buffer.close()
    module._buffer = None


def _import_vllm(part: str) -> Any:
    """One of its files for `Buffer`, with what it says of micro-batches made plain: there is one."""
    _import_from("vllm")
    name = "vllm.model_executor.layers.fused_moe"
    folder = ROOT / "vllm" / "vllm" / "model_executor" / "layers" / "fused_moe"
    if name not in sys.modules:
        parts = ("modular_kernel", "topk_weight_and_reduce")
        files = {f"{name}.{file}": folder / f"{file}.py" for file in parts}
        for file in ("deepep_ht", "deepep_ll", "deepep_v2"):
            files[f"{name}.prepare_finalize.{file}"] = folder / "prepare_finalize" / f"{file}.py"
        files["vllm.utils.math_utils"] = ROOT / "vllm" / "vllm" / "utils" / "math_utils.py"
        sys.meta_path.insert(0, _Stubs("vllm", files))
    module: Any = __import__(f"{name}.prepare_finalize.{part}", fromlist=[part])
    module.dbo_enabled = lambda: False
    module.dbo_current_ubatch_id = lambda: 0
    module.dbo_get_previous_event = lambda capture: None
    sys.modules[f"{name}.modular_kernel"].PIN_MEMORY = False  # type: ignore[attr-defined]
    return module


def _vllm_buffer(**options: Any) -> Any:
    import deep_ep

    return deep_ep.Buffer(dist.group.WORLD, 1 << 20, 1 << 20, explicitly_destroy=True, **options)


def check_vllm_prefill(is_async: bool) -> None:
    """`DeepEPHTPrepareAndFinalize`: rows by source, with global experts, and combined."""
    module = _import_vllm("deepep_ht")
    rank, case = dist.get_rank(), _case()
    inputs, first = case.inputs(rank), rank * case.num_experts // case.num_ranks
    buffer = _vllm_buffer()
    made = module.DeepEPHTPrepareAndFinalize(buffer, case.num_ranks, 1, first)
    made.sync_dbo_comm = False  # of ROCm
    config = SimpleNamespace(is_block_quantized=False, quant_dtype=None, a1_scale=None)
    sent = (inputs.x, inputs.topk_weights, inputs.topk_idx, case.num_experts, None, False, config)
    for _ in range(2):
        prepared = made.prepare_async(*sent, defer_input_quant=True)() if is_async else made.prepare(*sent, True)
        rows, scales, _, experts, weights = prepared
        assert scales is None
        here = (experts >= first) & (experts < first + case.num_experts // case.num_ranks)
        factors = torch.where(here, weights * (experts + 1), 0.0).sum(1, keepdim=True)
        y = (rows.float() * factors).to(rows.dtype)
        output = _finalized(made, inputs.x, y, weights, experts, is_async)
        torch.testing.assert_close(output.double(), _dense(case, rank), rtol=2**-6, atol=2**-5)
    buffer.destroy()


def _finalized(
    made: Any, like: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, is_async: bool
) -> torch.Tensor:
    """What vLLM's `finalize` makes of the experts' rows, which they have weighted."""
    reduce = SimpleNamespace(apply=lambda fused_expert_output, **_: fused_expert_output)
    output = torch.empty_like(like)
    back = (output, y, weights, experts, False, reduce)
    if is_async:
        made.finalize_async(*back)()
    else:
        made.finalize(*back)
    return output


def check_vllm_decode(is_async: bool) -> None:
    """`DeepEPLLPrepareAndFinalize`: rows packed by expert, with counts, and their weighted sum."""
    module = _import_vllm("deepep_ll")
    rank, case = dist.get_rank(), replace(_case(), hidden=2048)
    inputs, num_local = case.inputs(rank), case.num_experts // case.num_ranks
    buffer = _vllm_buffer(low_latency_mode=True, num_qps_per_rank=num_local)
    made = module.DeepEPLLPrepareAndFinalize(buffer, case.max_tokens, case.num_ranks)
    config = SimpleNamespace(
        quant_dtype=None, a1_scale=None, a2_scale=None, per_act_token_quant=False, block_shape=None
    )
    module.moe_kernel_quantize_input = lambda x, *_: (x, None)
    delegate = sys.modules[module.TopKWeightAndReduceDelegate.__module__].TopKWeightAndReduceDelegate()
    sent = (inputs.x, inputs.topk_weights, inputs.topk_idx, case.num_experts, None, False, config)
    numbers = torch.arange(rank * num_local, (rank + 1) * num_local).view(-1, 1, 1) + 1
    for _ in range(2):
        if is_async:
            hook, receive = made.prepare_async(*sent)
            hook()
            rows, _, tokens, *_ = receive()
        else:
            rows, _, tokens, *_ = made.prepare(*sent)
        counts = tokens.expert_num_tokens
        is_row = torch.arange(rows.shape[1]) < counts.unsqueeze(1)
        y = torch.where(is_row.unsqueeze(2), rows.float() * numbers, float("nan")).to(rows.dtype)
        output = torch.empty_like(inputs.x)
        back = (output, y, inputs.topk_weights, inputs.topk_idx, False, delegate)
        if is_async:
            hook, receive = made.finalize_async(*back)
            hook()
            receive()
        else:
            made.finalize(*back)
        torch.testing.assert_close(output.double(), _dense(case, rank), rtol=2**-6, atol=2**-5)
    buffer.destroy()


def _globalize(topk_idx: torch.Tensor, arrived: torch.Tensor, first: int, num_experts: int) -> torch.Tensor:
    """What a Triton kernel of vLLM does to local experts of received rows."""
    is_row = torch.arange(len(topk_idx)).unsqueeze(1) < arrived[-1]
    is_kept = is_row & (topk_idx >= 0) & (topk_idx + first < num_experts)
    return torch.where(is_kept, topk_idx + first, -1)


def check_vllm_v2(is_decode: bool, is_async: bool) -> None:
    """`DeepEPV2PrepareAndFinalize`: prefill has rows by expert, decode a bounded number of rows by source."""
    module = _import_vllm("deepep_v2")
    rank, case = dist.get_rank(), _case()
    inputs, first = case.inputs(rank), rank * case.num_experts // case.num_ranks
    import deep_ep

    buffer = deep_ep.ElasticBuffer(
        dist.group.WORLD, num_max_tokens_per_rank=64, hidden=case.hidden, num_topk=case.topk, explicitly_destroy=True
    )
    made = module.DeepEPV2PrepareAndFinalize(
        buffer, case.num_ranks, 1, first, case.num_experts, case.topk, use_cudagraph=is_decode
    )
    module._globalize_recv_topk_idx = _globalize
    everywhere = SimpleNamespace(num_tokens_across_dp_cpu=torch.full((case.num_ranks,), case.max_tokens))
    module.get_forward_context = lambda: SimpleNamespace(dp_metadata=everywhere)
    config = SimpleNamespace(is_block_quantized=False, quant_dtype=None, a1_scale=None)
    sent = (inputs.x, inputs.topk_weights, inputs.topk_idx, case.num_experts, None, False, config)
    for _ in range(2):
        rows, scales, _, experts, weights = made.prepare_async(*sent, True)() if is_async else made.prepare(*sent, True)
        assert scales is None
        assert len(rows) == (case.num_ranks * 32 if is_decode else len(experts))
        factors = torch.where(experts >= 0, weights * (experts + 1), 0.0).sum(1, keepdim=True)
        y = torch.where(factors > 0, rows.float() * factors, 0.0).to(rows.dtype)
        output = _finalized(made, inputs.x, y, weights, experts, is_async)
        torch.testing.assert_close(output.double(), _dense(case, rank), rtol=2**-6, atol=2**-5)
    buffer.destroy()


def check_deepspeed() -> None:
    """Its exchange for DeepEP V2, forward and backward, against a dense mixture."""
    module = _module_of("deepspeed", "deepspeed.module_inject.auto_ep_comm")
    rank, case = dist.get_rank(), _case()
    inputs = case.inputs(rank)
    exchange = module.DeepEPExchange(
        module.new_exchange_scope(), dist.group.WORLD, case.num_experts, case.topk, case.hidden, case.max_tokens
    )
    x, scores = inputs.x.clone().requires_grad_(), inputs.topk_weights.clone().requires_grad_()
    rows, weights, _ = module.deepep_dispatch(exchange, x, inputs.topk_idx, scores)
    handle = exchange.last_handle
    y = _times_expert(rows, handle.num_recv_tokens_per_expert_list, weights)
    combined = module.deepep_combine(exchange, y, handle)
    torch.testing.assert_close(combined.double(), _dense(case, rank), rtol=2**-6, atol=2**-5)
    combined.float().sum().backward()
    assert scores.grad is not None
    sums = inputs.x.float().sum(1, keepdim=True) * (inputs.topk_idx + 1)
    torch.testing.assert_close(scores.grad, sums, rtol=2**-4, atol=2**-1)
    exchange.destroy()


def check_lmdeploy() -> None:
    """Its dispatcher for DeepEP V1 in prefill, which permutes the rows by expert."""
    _import_from("lmdeploy")
    folder, package = ROOT / "lmdeploy" / "lmdeploy" / "pytorch", "lmdeploy.pytorch"
    parts = ("envs", "backends.token_dispatcher", "backends.default.token_dispatcher", "backends.cuda.token_dispatcher")
    if f"{package}.envs" not in sys.modules:
        files = {f"{package}.{part}": folder / Path(*part.split(".")).with_suffix(".py") for part in parts}
        sys.meta_path.insert(0, _Stubs("lmdeploy", files))
    module: Any = __import__(f"{package}.backends.cuda.token_dispatcher", fromlist=["token_dispatcher"])
    rank, case = dist.get_rank(), _case()
    inputs, num_local = case.inputs(rank), case.num_experts // case.num_ranks
    made = module.DeepEPTokenDispatcher(
        dist.group.WORLD, case.num_experts, num_local, case.hidden, torch.bfloat16, case.max_tokens
    )
    for _ in range(2):
        rows, _, _, counts = made.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
        y = _times_expert(rows, counts.tolist(), torch.ones(len(rows)))
        torch.testing.assert_close(made.combine(y).double(), _dense(case, rank), rtol=2**-5, atol=2**-4)


def _transformers_experts(ep_implementation: str, meshes: tuple[Any, Any]) -> Any:
    """The experts of a small Mixtral, split over the ranks, with the same values for every implementation."""
    from transformers import MixtralConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    case = _case()
    config = MixtralConfig(
        hidden_size=case.hidden, intermediate_size=64, num_local_experts=case.num_experts, num_experts_per_tok=3
    )
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    plan = {"experts.gate_up_proj": "grouped_gemm", "experts.down_proj": "grouped_gemm"}
    return apply_expert_parallelism(
        block, *meshes, plan | {"experts": "ep_dispatch_experts"}, ep_implementation=ep_implementation
    )


def check_transformers(shares_batch: bool, merges_rows: bool, bound: int | None) -> None:
    """Its mixture over `HybridEP` and its own all-to-all: ragged, with an empty rank, and with slices of a batch."""
    path = str(ROOT / "transformers")
    if path not in sys.path:
        sys.path.append(path)  # behind this environment's packages
    from hybrid_ep.integrations.transformers import HybridEP

    HybridEP.merges_rows, HybridEP.max_tokens_per_rank = merges_rows, bound
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sizes = (1, num_ranks) if shares_batch else (num_ranks, 1)
    meshes = (
        dist.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("ep",))["ep"],
        dist.init_device_mesh("cpu", sizes, mesh_dim_names=("fsdp", "tp"))["tp"],
    )
    ours, theirs = (_transformers_experts(name, meshes) for name in ("hybrid_ep", "all_to_all"))
    for step, num_tokens in enumerate((13, 1, 0)):
        num_tokens = num_tokens if shares_batch or rank == 0 else 5
        generator = torch.Generator().manual_seed(step * num_ranks + (0 if shares_batch else rank))
        x = torch.randn(1, num_tokens, _case().hidden, generator=generator).to(torch.bfloat16)
        results = []
        for block in (ours, theirs):
            block.zero_grad()
            leaf = x.clone().requires_grad_()
            y = block(leaf)
            y.square().sum().backward()
            grads = [getattr(p.grad, "_local_tensor", p.grad) for p in block.parameters()]
            results.append((y, leaf.grad, *(g for g in grads if g is not None)))
        (y, *grads), (want, *want_grads) = results
        if merges_rows:
            torch.testing.assert_close(y, want, rtol=2**-6, atol=2**-6)
        else:
            assert torch.equal(y, want)
        for grad, want_grad in zip(grads, want_grads, strict=True):
            most = 2**-7 * want_grad.abs().max().item() if want_grad.numel() else 0.0
            torch.testing.assert_close(grad.float(), want_grad.float(), rtol=2**-6, atol=most)
