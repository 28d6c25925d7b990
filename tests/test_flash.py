"""FlashAttention as a backend, against stand-ins with the signatures of its three packages, and what it refuses."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from types import ModuleType
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import test_properties
from conformance import excesses, problem, random_calls
from dilated_attention import BackendError, BlockLayout, block_sparse_attention, dilated_attention, operators
from dilated_attention.backends import flash, native
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.fused import Merged, Scores
from dilated_attention.backends.reference import count_matrix
from dilated_attention.backends.table import BACKENDS, Choice
from dilated_attention.call import Call
from dilated_attention.patterns import Dilated
from dilated_attention.plan import plan_dilated


def attend(q, k, v, scale, causal):
    """out (batch, seq, heads, head_dim) and lse (batch, heads, seq), FlashAttention's layouts, by plain products."""
    check(q, k, v)
    score = scale * torch.einsum("bnhd,bmhd->bhnm", q.float(), k.float())
    if causal:
        score = score.masked_fill(torch.ones(score.shape[-2:]).triu(1).bool(), -torch.inf)
    lse = score.logsumexp(-1)
    return torch.einsum("bhnm,bmhd->bnhd", (score - lse[..., None]).exp(), v.float()).to(q.dtype), lse


def differentiate(dout, q, k, v, out, lse, scale, causal):
    """dq, dk, dv from a given out and lse."""
    check(dout, q, k, v, out)
    assert lse.is_contiguous()
    assert lse.isfinite().all()
    dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
    p = (scale * torch.einsum("bnhd,bmhd->bhnm", q, k) - lse[..., None]).exp()
    p = p.tril() if causal else p
    ds = p * (torch.einsum("bnhd,bmhd->bhnm", dout, v) - (dout * out).sum(-1).transpose(1, 2)[..., None]) * scale
    return (
        torch.einsum("bhnm,bmhd->bnhd", ds, k),
        torch.einsum("bhnm,bnhd->bmhd", ds, q),
        torch.einsum("bhnm,bnhd->bmhd", p, dout),
    )


def check(*tensors):
    for x in tensors:
        assert x.dtype in (torch.float16, torch.bfloat16)
        assert x.stride(-1) == 1
        assert x.shape[-1] % 8 == 0
        assert x.shape[-1] <= 256
        assert x.data_ptr() % 16 == 0, "what is misaligned ends the CUDA context"
        assert not any(2 * n % 16 for n, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1)


# Parameters in the packages' own order and with their own defaults.


def two_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
    return *attend(q, k, v, softmax_scale, causal), None, None


def two_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    for x, y in zip((dq, dk, dv), differentiate(dout, q, k, v, out, softmax_lse, softmax_scale, causal), strict=True):
        x.copy_(y)


def three_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    return *attend(q, k, v, softmax_scale, causal), None, None


def three_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
    max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    two_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, 0.0, softmax_scale, is_causal, -1, -1, 0.0, None, deterministic
    )


def four_forward(q, k, v, *rest, softmax_scale=None, causal=False, return_lse=False):
    assert return_lse
    assert not rest
    return attend(q, k, v, softmax_scale, causal)


def four_backward(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, deterministic=False):
    gradients = differentiate(dout, q, k, v, out, lse, softmax_scale, causal)
    return tuple(x.to(q.dtype) for x in gradients)


STAND_INS = {
    2: {"_flash_attn_forward": two_forward, "_flash_attn_backward": two_backward},
    3: {"_flash_attn_forward": three_forward, "_flash_attn_backward": three_backward},
    4: {"_flash_attn_fwd": four_forward, "_flash_attn_bwd": four_backward},
}


@pytest.fixture
def installed(monkeypatch):
    """`installed(number)`: that version alone is there, and serves every device."""

    def install(number):
        module = ModuleType(flash.MODULES[number])
        module.__dict__.update(STAND_INS[number])
        monkeypatch.setitem(sys.modules, flash.MODULES[number], module)
        monkeypatch.setattr(flash, "version", lambda capability: number)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(flash, "Facts", on_a_gpu)

    return install


def on_a_gpu(device, *facts):
    return Facts(torch.device("cuda"), *facts)


@pytest.mark.parametrize("head_dim", [16, 256])
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("number", STAND_INS)
def test_the_oracle(installed, number, is_causal, head_dim):
    """A gradient on lse takes more columns than 256 if head_dim is as large."""
    installed(number)
    w, r, seq_len = (32, 70), (1, 3), 70
    branches = Dilated(w, r).branches(2)
    inputs = tuple(
        torch.randn(2, seq_len, heads, head_dim + 1).bfloat16()[..., 1:] for heads in (4, 2, 2)
    )  # misaligned rows

    def run(q, k, v):
        call = Call(branches, Choice(BACKENDS["flash"]), is_causal=is_causal, scale=head_dim**-0.5)
        out, lse = operators.attend(q, k, v, call)
        return out, lse.transpose(1, 2)

    errors = excesses(run, inputs, count_matrix(*branches[:3], seq_len, is_causal=is_causal), scale=head_dim**-0.5)
    assert all(error <= 1 for error in errors.values()), errors


@random_calls(40)
@given(
    call=st.one_of(test_properties.calls(), test_properties.calls(ragged=True)),
    dtype=test_properties.HALF_PRECISION,
    number=st.sampled_from(sorted(STAND_INS)),
)
def test_random_calls(call, dtype, number):
    module = ModuleType(flash.MODULES[number])
    module.__dict__.update(STAND_INS[number])
    call = replace(call, padding=None, dropout_p=0.0, head_dim=-(-call.head_dim // 8) * 8)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.dict(sys.modules, {flash.MODULES[number]: module}))
        patches.enter_context(mock.patch.object(flash, "version", return_value=number))
        patches.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)))
        patches.enter_context(mock.patch.object(flash, "Facts", on_a_gpu))
        there = replace(
            BACKENDS["flash"], refusal=lambda facts: flash.refusal(facts._replace(device=torch.device("cuda")))
        )
        patches.enter_context(mock.patch.dict(BACKENDS, {"flash": there}))
        test_properties.check(call, dtype, "flash")


@pytest.mark.parametrize("number", STAND_INS)
def test_backward_is_deterministic_where_pytorch_is_told_so(installed, monkeypatch, number):
    installed(number)
    name, asked = "_flash_attn_bwd" if number == 4 else "_flash_attn_backward", []

    def backward(*tensors, deterministic, **options):
        asked.append(deterministic)
        return STAND_INS[number][name](*tensors, deterministic=deterministic, **options)

    monkeypatch.setattr(sys.modules[flash.MODULES[number]], name, backward)
    q, lse = torch.randn(1, 2, 16, 16).half(), torch.zeros(1, 2, 16)
    for enabled in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda enabled=enabled: enabled)
        flash.backward(Scores(False, 0.25), Merged(q, None, q, lse), q, q, q)
    assert asked == [False, True]


def test_views_are_not_copied(installed, monkeypatch):
    installed(3)
    seen = []

    def forward(q, k, v, **options):
        seen.extend(x.untyped_storage().data_ptr() for x in (q, k, v))
        return three_forward(q, k, v, **options)

    monkeypatch.setattr(sys.modules[flash.MODULES[3]], "_flash_attn_forward", forward)
    q, k, v = (torch.randn(1, 64, 2, 16).half() for _ in range(3))
    plan = plan_dilated((64,), (2,), ((0, 1),), 64)
    native.forward(problem(plan, is_causal=False, scale=0.25), q, k, v, operators=flash)
    assert set(seen) == {x.data_ptr() for x in (q, k, v)}


def test_what_it_cannot_serve_is_refused(installed):
    device = torch.device("cuda")

    def why(*facts):
        return flash.refusal(Facts(*facts))

    assert "needs a CUDA device; got cpu" in why(torch.device("cpu"), torch.float16)
    installed(2)
    assert why(device, torch.float16) is None
    assert "no torch.float32; use float16" in why(device, torch.float32)
    assert "that 8 divides, at most 256; got 20" in why(device, torch.float16, 20)
    assert "got 264" in why(device, torch.float16, 264)
    assert "does not serve dropout_p or a block layout; use" in why(
        device, torch.float16, 64, 1, ("dropout_p", "a block layout")
    )


def test_where_none_is_installed(monkeypatch):
    flash.version.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    message = flash.refusal(Facts(torch.device("cuda"), torch.float16))
    assert message.startswith("FlashAttention needs flash_attn_interface or flash_attn.cute.interface or flash_attn.")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0" in flash.refusal(Facts(torch.device("cuda"), torch.float16))


def test_versions_by_capability(monkeypatch):
    assert [flash.order(capability) for capability in ((7, 5), (8, 6), (9, 0), (10, 0), (12, 0))] == [
        (), (2,), (3, 4, 2), (4, 2), (2,),
    ]  # fmt: skip
    monkeypatch.setattr(flash, "_installed", lambda module: module != flash.MODULES[3])
    flash.version.cache_clear()
    assert flash.version((9, 0)) == 4
    assert flash.version((8, 0)) == 2
    flash.version.cache_clear()


def test_by_name():
    q = torch.randn(1, 32, 2, 16).half()
    with pytest.raises(
        BackendError, match="backend='flash' cannot serve this call: FlashAttention needs a CUDA device"
    ):
        dilated_attention(q, q, q, (32,), (1,), backend="flash")
    with pytest.raises(BackendError, match="flash"):
        block_sparse_attention(q, q, q, BlockLayout.local(32, 16, 16), backend="flash")


def test_by_name_in_a_graph(compiling_python):
    """Checks that the trace could not make are made when the graph runs."""
    compiling_python("""
        import torch
        from dilated_attention import BackendError, dilated_attention

        def run(q):
            return dilated_attention(q, q, q, [32], [1], backend="flash")

        q = torch.randn(1, 32, 2, 16).half()
        try:
            torch.compile(run, fullgraph=True, backend="aot_eager")(q)
        except BackendError as error:
            assert "backend='flash' cannot serve this call: FlashAttention needs a CUDA device; got cpu" in str(error)
        else:
            raise AssertionError("FlashAttention ran on a CPU")
    """)
