"""What only the kernels in C do: they are compiled here, and share rows among threads."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tandem.engine.decoder.kernel_set import choose_kernels
from tandem.kernels.alone import LOCK
from tandem.kernels.cpu import build, launch
from tandem.kernels.reference import activation, kv_store, norm, prefill_attention
from tandem.runtime.errors import ConfigError
from tests.kernels.tolerance import on_cpu

pytestmark = on_cpu

CPU = torch.device("cpu")
EPS = 1e-6
SCALE = 0.3


@pytest.fixture
def compile_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache folder to be; what this process has loaded is forgotten, and after the test too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.load_library.cache_clear()
    yield tmp_path / "tandem"
    build.load_library.cache_clear()


def attend(paged, q: torch.Tensor, query_lens: list[int], attention: Callable[..., None]):
    out = torch.full_like(q, float("nan"))
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    longest = max(query_lens)
    tables, lens = paged.block_tables, paged.context_lens
    attention(q, paged.kv_cache, tables, starts, lens, longest, SCALE, out)
    return out


@pytest.mark.slow
def test_they_are_compiled_once_and_found_again(compile_anew: Path) -> None:
    assert build.load_library() is build.load_library()
    (built,) = compile_anew.glob("*.so")
    compiled_at = built.stat().st_mtime_ns
    build.load_library.cache_clear()
    build.load_library()
    assert list(compile_anew.glob("*.so")) == [built]
    assert built.stat().st_mtime_ns == compiled_at
    assert compile_anew.stat().st_mode & 0o77 == 0


@pytest.mark.parametrize(
    ("compiler", "why"),
    [("no-such-cc", "no C compiler 'no-such-cc'"), ("false", "false --version failed")],
)
def test_without_a_compiler_pytorch_computes_and_it_is_said(
    compile_anew: Path,
    compiler: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        assert choose_kernels("auto", CPU) == "torch"
    assert why in caplog.text
    with pytest.raises(ConfigError, match=why) as caught:
        choose_kernels("c", CPU)
    assert caught.value.param == "kernels"


@pytest.mark.slow
def test_another_processor_has_a_library_of_its_own(
    compile_anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.load_library()
    (built,) = compile_anew.glob("*.so")
    monkeypatch.setenv(build.PROCESSOR_VARIABLE, "no-such-processor")
    build.load_library.cache_clear()
    with pytest.raises(build.BuildError, match="no-such-processor"):
        build.load_library()
    monkeypatch.setenv(build.PROCESSOR_VARIABLE, "native")
    build.load_library()
    assert {path.name for path in compile_anew.iterdir()} == {LOCK, built.name}


@pytest.mark.slow
def test_a_library_that_another_user_could_have_written_is_compiled_anew(
    compile_anew: Path,
) -> None:
    build.load_library()
    (built,) = compile_anew.glob("*.so")
    built.unlink()  # this process has it mapped: to write over it would end the process
    built.write_bytes(b"planted")
    built.chmod(0o722)
    build.load_library.cache_clear()
    build.load_library()
    assert built.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("is_of_another", [False, True])
def test_a_cache_folder_that_another_user_could_write_to_is_not_used(
    compile_anew: Path, is_of_another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_anew.mkdir(mode=0o700)
    if is_of_another:
        monkeypatch.setattr(build.os, "geteuid", lambda: compile_anew.stat().st_uid + 1)
    else:
        compile_anew.chmod(0o777)
    with pytest.raises(build.BuildError, match=f"{compile_anew} belongs to another user or can"):
        build.load_library()
    assert list(compile_anew.iterdir()) == []


def test_a_source_that_does_not_compile_leaves_nothing_behind(
    compile_anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wrong.c").write_text("this is not C")
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    with pytest.raises(build.BuildError, match="error"):
        build.load_library()
    assert [path.name for path in compile_anew.iterdir()] == [LOCK]


def test_a_gpu_is_not_for_them() -> None:
    with pytest.raises(ConfigError, match="run on a CPU, not on cuda:0"):
        choose_kernels("c", torch.device("cuda:0"))


def test_bfloat16_steps_are_those_of_the_reference() -> None:
    torch.manual_seed(5)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape).bfloat16()

    def both(
        kernel: Callable[..., None], reference: Callable[..., None], *inputs: torch.Tensor
    ) -> None:
        """The last argument is written; one unit of bfloat16 apart at most."""
        outputs = []
        for call in kernel, reference:
            mine = [each.clone() for each in inputs]
            call(*mine)
            outputs.append(mine)
        for ours, expected in zip(*outputs, strict=True):
            torch.testing.assert_close(ours, expected, rtol=2.0**-7, atol=2.0**-9)

    both(launch.silu_mul, activation.silu_mul, randn(9, 74), randn(9, 37))
    both(
        lambda x, r, w, out: launch.add_rms_norm(x, r, w, EPS, out),
        lambda x, r, w, out: norm.add_rms_norm(x, r, w, EPS, out),
        *(randn(9, 200), randn(9, 200), randn(200), randn(9, 200)),
    )
    positions, slots = torch.arange(9), torch.tensor([4, -1, 8, 0, 1, 2, 3, 30, 31])
    both(
        lambda qkv, w, table, pool, q: launch.store_qkv(
            qkv, w, table, positions, slots, pool, EPS, q
        ),
        lambda qkv, w, table, pool, q: kv_store.store_qkv(
            qkv, w, table, positions, slots, pool, EPS, q
        ),
        *(randn(9, 8, 24), randn(6, 24), randn(9, 2, 24), randn(4, 2, 2, 8, 24), randn(9, 4, 24)),
    )


@pytest.mark.parametrize("head_dim", [24, 64])
def test_attention_in_bfloat16_is_that_of_the_reference(make_paged, head_dim: int) -> None:
    paged = make_paged([200, 7, 150], head_dim=head_dim, dtype=torch.bfloat16, stale=0.0)
    query_lens = [200, 1, 20]
    q = torch.randn(sum(query_lens), 6, head_dim).bfloat16()
    ours = attend(paged, q, query_lens, launch.prefill_attention)
    expected = attend(paged, q, query_lens, prefill_attention.prefill_attention)
    torch.testing.assert_close(ours, expected, rtol=2.0**-7, atol=2.0**-7)


def test_a_query_gets_the_same_whatever_is_computed_beside_it(make_paged) -> None:
    paged = make_paged([300, 40], head_dim=64)
    q = torch.randn(340, 6, 64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = attend(paged, q, [300, 40], launch.prefill_attention)
        torch.set_num_threads(3)
        assert torch.equal(attend(paged, q, [300, 40], launch.prefill_attention), together)
        last = attend(paged, q[[299, 339]], [1, 1], launch.prefill_attention)
        assert torch.equal(last, together[[299, 339]])
        chunk = attend(paged, q[250:][: 50 + 40], [50, 40], launch.prefill_attention)
        assert torch.equal(chunk, together[250:])
    finally:
        torch.set_num_threads(before)


def test_large_batches_are_shared_among_threads_and_give_the_same() -> None:
    before = torch.get_num_threads()
    gate_up, x = torch.randn(300, 600), torch.randn(300, 300)
    results = []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            opened, normed = torch.empty(300, 300), torch.empty(300, 300)
            launch.silu_mul(gate_up, opened)
            launch.rms_norm(x, x[0], EPS, normed)
            results.append((opened, normed))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_scores_far_below_zero_and_far_above_it_are_weighed(make_paged) -> None:
    paged = make_paged([160], num_kv_heads=1, head_dim=16)
    q = 300 * torch.randn(160, 2, 16)
    expected = paged.expect(q, 0, SCALE)
    torch.testing.assert_close(
        attend(paged, q, [160], launch.prefill_attention), expected, rtol=1e-3, atol=1e-3
    )


def test_what_is_not_a_number_is_not_hidden(make_paged) -> None:
    paged = make_paged([30])
    q = torch.randn(30, 2, 16)
    q[7, 1, 3] = float("nan")
    out = attend(paged, q, [30], launch.prefill_attention)
    bad = out.isnan().any(-1)
    assert bad[7, 1] and bad.sum() == 1
    gate_up = torch.ones(1, 40)
    gate_up[0, 3] = float("nan")
    opened = torch.empty(1, 20)
    launch.silu_mul(gate_up, opened)
    assert opened.isnan().nonzero().tolist() == [[0, 3]]
