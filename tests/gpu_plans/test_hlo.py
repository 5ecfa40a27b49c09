"""What is read from the text of an optimized module."""

import pytest

from jaxoffload.compile import hlo

HEAD = (
    "HloModule jit_body, is_scheduled=true, input_output_alias={ {0}: (3, {}, may-alias), "
    "{1}: (2, {}, must-alias), {10}: (4, {}, may-alias) }, entry_computation_layout={(f32[8]{0})->"
    '(f32[8]{0}, f32[8]{0})}, frontend_attributes={x="1"}\n'
)
TEXT = (
    HEAD
    + """
%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %copy.9 = f32[8]{0} copy(%p)
}

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]{0}) parameter(0)
  %cholesky.0 = (f32[512,512]{0,1}, s32[]) custom-call(%s), custom_call_target="cusolver_potrf_ffi", api_version=API_VERSION_TYPED_FFI
  ROOT %t = (s32[], f32[8]{0}) tuple(%s)
}

ENTRY %main.1 (a.1: f32[8], b.1: f32[8], c: f32[8], d: f32[8]) -> (f32[8], f32[8]) {
  %a.1 = f32[8]{0} parameter(0), metadata={op_name="copy(a)"}
  %b.1 = f32[8]{0} parameter(1)
  %gemm = f32[8]{0} fusion(%a.1), kind=kCustom, calls=%g, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %matmul = (f32[8]{0}, s8[33554432]{0}) custom-call(%gemm, %b.1), custom_call_target="__cublas$lt$matmul", backend_config={}
  %get = f32[8]{0} get-tuple-element(%matmul), index=0
  %conv = (f32[8,56]{1,0}, u8[0]{0}) custom-call(%get), custom_call_target="__cudnn$convForward"
  %ours = f32[8]{0} custom-call(%get), custom_call_target="my_kernel"
  %fft.1 = c64[8]{0} fft(%get), fft_type=FFT, fft_length={8}
  %copy.5 = f32[8]{0} copy(%get)
  %wrapped_copy.1 = f32[8]{0} fusion(%get), kind=kLoop, calls=%wrapped_copy_computation
  %while.2 = (s32[], f32[8]{0}) while(%t), condition=%c, body=%body
  %bitcast.1 = f32[8]{0} bitcast(%copy.5)
  ROOT %tuple.1 = (f32[8]{0}, f32[8]{0}) tuple(%bitcast.1, %gemm)
}
"""  # noqa: E501
)


def test_aliases_are_pairs_of_output_and_parameter():
    assert hlo.read(TEXT).aliases == ((0, 3), (1, 2), (10, 4))


def test_the_output_of_a_module_with_one_is_called_nothing():
    text = "HloModule m, input_output_alias={ {}: (2, {}, may-alias) }, entry_computation={}\n"
    assert hlo.read(text).aliases == ((0, 2),)
    assert hlo.read("HloModule m, entry_computation_layout={}\n").aliases == ()


def test_launches_and_copies_are_the_entrys():
    module = hlo.read(TEXT)
    assert module.launches == 8, "two products, two calls, an FFT, two copies, a loop"
    assert module.copies == 2


def test_calls_are_told_by_library_in_loops_as_well():
    assert hlo.read(TEXT).calls == {
        "Triton": 1,
        "cuBLASLt": 1,
        "cuDNN": 1,
        "cuFFT": 1,
        "cuSOLVER": 1,
        "my_kernel": 1,
    }


ESTIMATED = """
%fused (p: f32[8]) -> f32[8] {
  ROOT %inner = f32[8]{0} copy(%p), backend_config={"reification_cost":[{"exec_time_us":900,"name":"sol"}]}
}

%body.1 (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %add = f32[8]{0} fusion(%s), kind=kLoop, calls=%fused, backend_config={"reification_cost":[{"exec_time_us":7,"name":""},{"end_to_end_cycles":0,"exec_time_us":0.5,"name":"sol"}]}
  ROOT %t = (s32[], f32[8]{0}) tuple(%s)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %gemm = f32[8]{0} fusion(%a), kind=kCustom, calls=%g, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"},"reification_cost":[{"exec_time_us":90,"name":""},{"exec_time_us":2e1,"name":"sol"}]}
  %solver = f32[8]{0} custom-call(%gemm), custom_call_target="cusolver_potrf_ffi", backend_config={"reification_cost":[]}
  %bare = f32[8]{0} copy(%solver)
  ROOT %while.2 = (s32[], f32[8]{0}) while(%bare), condition=%c, body=%body.1, backend_config={"known_trip_count":{"n":"6"}}
}
"""  # noqa: E501


def test_times_are_those_of_xlas_model_that_knows_the_rates():
    module = hlo.read(HEAD + ESTIMATED)
    assert module.seconds == pytest.approx((20 + 6 * 0.5) * 1e-6)
    assert module.without_estimate == 2, "a library's call and a copy; the loop is its body"
    assert hlo.read(TEXT).seconds == 0
