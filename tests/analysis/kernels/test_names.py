"""The spellings of three real tools have one normal form; other names stay valid."""

import csv
import gzip
import json
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.analysis.kernels.names import DEEPEST, function_name, has_arguments, normal_name, short_name, short_names

H200 = Path(__file__).parents[2] / "fixtures" / "h200"


@pytest.fixture(scope="module")
def torch_names() -> set[str]:
    events = json.loads(gzip.decompress((H200 / "torch_trace.json.gz").read_bytes()))["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "kernel"}


@pytest.fixture(scope="module")
def nsys_names(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    """Pairs of (short, demangled)."""
    file = tmp_path_factory.mktemp("nsys") / "decode.sqlite"
    file.write_bytes(gzip.decompress((H200 / "nsys_decode.sqlite.gz").read_bytes()))
    query = (
        "select distinct s.value, d.value from CUPTI_ACTIVITY_KIND_KERNEL k "
        "join StringIds s on s.id = k.shortName join StringIds d on d.id = k.demangledName"
    )
    connection = sqlite3.connect(file)
    try:
        return set(connection.execute(query))
    finally:
        connection.close()


@pytest.fixture(scope="module")
def ncu_names() -> set[str]:
    found = set()
    for name in ("ncu_decode_step_raw.csv.gz", "ncu_prefill_aborted_raw.csv.gz"):
        rows = list(csv.DictReader(gzip.decompress((H200 / name).read_bytes()).decode().splitlines()))
        found |= {row["Kernel Name"] for row in rows if row["Kernel Name"]}
    return found


def test_no_two_kernels_of_one_tool_share_a_normal_form(
    torch_names: set[str], nsys_names: set[tuple[str, str]], ncu_names: set[str]
) -> None:
    for names in (torch_names, {demangled for _, demangled in nsys_names}, ncu_names):
        assert len({normal_name(name) for name in names}) == len(names) > 30


def test_the_same_kernels_join_across_the_tools(
    torch_names: set[str], nsys_names: set[tuple[str, str]], ncu_names: set[str]
) -> None:
    torch, ncu = ({normal_name(name) for name in names} for names in (torch_names, ncu_names))
    assert {normal_name(demangled) for _, demangled in nsys_names} <= torch & ncu
    assert torch == ncu  # the counters were read of the same model: prefill and decode


def test_the_function_is_what_nsys_calls_the_short_name(nsys_names: set[tuple[str, str]]) -> None:
    assert {short: function_name(demangled) for short, demangled in nsys_names} == {short: short for short, _ in nsys_names}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("void f<(int)4, (bool)1>(T1 *)", "f<4, true>"),
        ("void a::b::f<a::b::C<2ul> >(int)", "void f<C<(unsigned long)2>>"),
        ("void (anonymous namespace)::f<int>(int)", "void <unnamed>::f<int>(T1)"),
        ("f<char *, const a::T>(int)", "f<char*, T const>"),
        ("void f<g(int)::{lambda(a::B<int>)#2}>(int)", "void f<void a::g(int)::[lambda(B<T1>) (instance 2)]>(T1)"),
        ("void f<std::enable_if<true, int>::type>(int)", "f<enable_if<1,int>::type>"),
        ("std::enable_if<true, void>::type f<int>(int)", "void f<int>(int)"),
        ("void f<&a::g>(int)", "f<&g>"),
        ("void f<-1, -2l>()", "f<(int)-1, (long)-2>"),
        ("void A<int>::operator()<float>(int) const", "A<int>::operator ()<float>(T1)"),
    ],
)
def test_spellings_of_one_kernel(one: str, other: str) -> None:
    assert normal_name(one) == normal_name(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("void f<g(int)::{lambda()#1}>()", "void f<h(int)::{lambda()#1}>()"),
        ("void f<g(int)::{lambda()#1}>()", "void f<g(int)::{lambda()#2}>()"),
        ("void f<g(int)::{lambda()#1}::operator()() const::{lambda()#2}>()", "void f<g(int)::{lambda()#2}>()"),
        ("void f<4>(int)", "void f<-4>(int)"),
        ("void f<unsigned int>(int)", "void f<int>(int)"),
        ("void f<char*>(int)", "void f<char>(int)"),
        ("void A<int>::run(int)", "void A<float>::run(int)"),
        ("void f<void (*)(int)>()", "void f<void (*)(float)>()"),
    ],
)
def test_different_kernels_stay_different(one: str, other: str) -> None:
    assert normal_name(one) != normal_name(other)


@pytest.mark.parametrize(
    "name",
    [
        "nvjet_sm90_tst_128x8_64x12_4x1_v_bz_TNT",
        "triton_poi_fused_add_mul_0",
        "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_stage5_warpsize2x2x1_tensor16x8x16_kernel",
        "_fwd_kernel_0d1d2d34d",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
    ],
)
def test_a_plain_name_is_its_own_form(name: str) -> None:
    assert normal_name(name) == function_name(name) == name
    assert not has_arguments(name)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        ),
        ("void A<int>::operator()<float>(int) const", "operator()"),
        ("void vllm::paged_attention_v1_kernel<float, 128>(float*)", "paged_attention_v1_kernel"),
        ("my own  name", "my own name"),
        ("", ""),
        ("f<", "f<"),
        ("f>)", "f>)"),
        ("{lambda", "{lambda"),
        ("()", "()"),
    ],
)
def test_function_of(name: str, function: str) -> None:
    assert function_name(name) == function


def test_a_name_deeper_than_any_compiler_writes_is_unchanged() -> None:
    deep = "f" + "<g" * (DEEPEST + 1) + ">" * (DEEPEST + 1)
    assert normal_name(deep) == deep
    assert normal_name("void " + "f<" * 50_000) == "void " + "f<" * 50_000


def test_every_normal_form_is_a_fixed_point(torch_names: set[str], ncu_names: set[str]) -> None:
    for name in torch_names | ncu_names:
        assert normal_name(normal_name(name)) == normal_name(name)
        assert function_name(normal_name(name)) == function_name(name)


@given(st.text(alphabet="ab<>():,*& {}[]#1_-lambdoperinsutcv~\n", max_size=60) | st.text(max_size=30))
def test_any_text_has_a_form_on_one_line(text: str) -> None:
    assert "\n" not in normal_name(text)
    assert "\n" not in function_name(text)


@given(st.text(min_size=1, max_size=200), st.integers(1, 80))
def test_the_short_form_fits(text: str, width: int) -> None:
    assert len(short_name(text, width)) <= width
    if len(normal_name(text)) <= width:
        assert short_name(text, width) == normal_name(text)


WIDTH = 24
_LONG = st.text("ab_", min_size=WIDTH, max_size=60)


@given(_LONG, st.text("ab_", max_size=60), st.text("ab_", max_size=60), _LONG)
def test_two_kernels_never_read_the_same(before: str, one: str, other: str, after: str) -> None:
    names = before + one + after, before + other + after
    shown = short_names(*names, WIDTH)
    assert (shown[0] == shown[1]) == (names[0] == names[1])
    assert max(map(len, shown)) <= WIDTH


def test_shortened_names_show_where_they_differ() -> None:
    one = "elementwise_kernel<128,4,gpu_kernel_impl_nocast<BinaryFunctor<BFloat16,BFloat16,MulFunctor<float>>>()::lambda#1>"
    assert short_name(one, 72) == short_name(one.replace("BFloat16,Mul", "BFloat32,Mul"), 72)
    shown = short_names(one, one.replace("BFloat16,Mul", "BFloat32,Mul"), 72)
    assert shown == (
        "elementwise_kernel<128,4…at16,BFloat16,MulFunctor<float>>>()::lambda#1>",
        "elementwise_kernel<128,4…at16,BFloat32,MulFunctor<float>>>()::lambda#1>",
    )


@pytest.mark.parametrize(
    ("name", "function"),
    [  # the first is one of an H200, cut; Nsight Compute lists it as device_kernel
        (
            "_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_for_sm9xINS_4gemm6kernel13GemmUniversalI",
            "device_kernel",
        ),
        ("_ZN2at6native13reduce_kernelILi512EEEvv", "reduce_kernel"),
        ("_ZN2at6native12_GLOBAL__N_14copyEv", "copy"),
        ("_Z4addNPfS_", "addN"),
        ("_ZL4fillPf", "fill"),
        ("_Z9my_kernel6Params", "my_kernel"),
        ("_ZL4fill6Params", "fill"),
        ("_ZSt4fill6Params", "fill"),
        ("_ZNSt3fooEv", "foo"),
        ("_ZN9999999x", "_ZN9999999x"),
        ("_Z", "_Z"),
        ("_ZTV3foo", "_ZTV3foo"),
    ],
)
def test_the_function_of_a_mangled_name(name: str, function: str) -> None:
    assert function_name(name) == function
    assert normal_name(name) == name
