"""From the projection to rotated queries, and keys and values in their slots and nowhere else."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tandem.kernels.cpu import launch
from tandem.kernels.layers import kv_store
from tandem.kernels.reference import kv_store as reference
from tests.kernels.tolerance import DTYPES, launchers, tolerance, unlike

EPS = 1e-6
MAX_LEN = 50

Outputs = tuple[torch.Tensor, torch.Tensor]
Store = Callable[..., None]
kinds = launchers("store", kv_store.store_qkv, reference.store_qkv, launch.store_qkv)


@dataclass
class Step:
    """One layer's inputs for some tokens, in the middle of a pool that is full of -3."""

    qkv: torch.Tensor  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    qk_norm: torch.Tensor | None
    rope_table: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    pool: torch.Tensor  # [num_blocks, 3, 2, num_kv_heads, block_size, head_dim]
    num_heads: int

    def run(self, store: Store, q_out: torch.Tensor | None = None, **options: object) -> Outputs:
        """The queries, and the pool."""
        if q_out is None:
            q_out = torch.full_like(self.queries, float("nan"))
        pool = self.pool.clone()
        store(
            self.qkv,
            self.qk_norm,
            self.rope_table,
            self.positions,
            self.slots,
            pool[:, 1],
            EPS,
            q_out,
            **options,
        )
        return q_out, pool

    @property
    def queries(self) -> torch.Tensor:
        return self.qkv[:, : self.num_heads]

    def rotated(self) -> torch.Tensor:
        """Queries and keys as they must become, in float64."""
        x = self.qkv[:, : (self.num_heads + self.qkv.shape[1]) // 2].double()
        if self.qk_norm is not None:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.qk_norm.double()
        cos, sin = self.rope_table[self.positions.long()].double().split(1, dim=1)
        return x * cos + x.roll(x.shape[2] // 2, -1) * sin

    def check(self, q_out: torch.Tensor, pool: torch.Tensor) -> None:
        expected = self.rotated()
        # One rounding at the end. The two products that add up may cancel: magnitude 2.
        atol = tolerance(q_out.dtype, 1, 2 * float(expected.abs().amax()))
        queries, keys = expected[:, : self.num_heads], expected[:, self.num_heads :]
        torch.testing.assert_close(q_out.double(), queries, rtol=0, atol=atol)
        untouched = pool.clone()
        block_size = pool.shape[4]
        for token, slot in enumerate(self.slots.tolist()):
            if slot < 0:
                continue
            where = slot // block_size, 1, slice(None), slice(None), slot % block_size
            torch.testing.assert_close(pool[where][0].double(), keys[token], rtol=0, atol=atol)
            assert torch.equal(pool[where][1], self.qkv[token, -keys.shape[1] :])
            untouched[where] = -3.0
        assert torch.all(untouched == -3.0)


def make_step(
    slots: list[int],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    *,
    with_norm: bool = True,
    index_dtype: torch.dtype = torch.int64,
    device: str = "cpu",
) -> Step:
    generator = torch.Generator().manual_seed(len(slots) + num_heads + head_dim)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    num_blocks = max([*slots, 0]) // block_size + 2
    angles = torch.rand(MAX_LEN, head_dim // 2, generator=generator) * 6
    cos, sin = angles.cos(), angles.sin()
    rope_table = torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], 1)
    # Within a wider projection: a token's stride is not its width.
    fused = randn(len(slots), num_heads + 2 * num_kv_heads + 1, head_dim)
    pool_shape = (num_blocks, 3, 2, num_kv_heads, block_size, head_dim)
    return Step(
        qkv=fused[:, :-1],
        qk_norm=1 + randn(num_heads + num_kv_heads, head_dim) / 4 if with_norm else None,
        rope_table=rope_table.to(dtype).to(device),
        positions=torch.randint(0, MAX_LEN, (len(slots),), generator=generator)
        .to(index_dtype)
        .to(device),
        slots=torch.tensor(slots, dtype=index_dtype, device=device),
        pool=torch.full(pool_shape, -3.0, dtype=dtype, device=device),
        num_heads=num_heads,
    )


@kinds
@pytest.mark.parametrize(
    ("slots", "dtype"),
    [
        ([5], torch.float32),
        (list(range(40, 35, -1)), torch.float32),
        *(([0, 3, 12, 13], dtype) for dtype in DTYPES),
    ],
)
@pytest.mark.parametrize("with_norm", [True, False], ids=["norm", "no-norm"])
def test_queries_are_rotated_and_keys_and_values_land_in_their_slots(
    store: Store, device: str, dtype: torch.dtype, with_norm: bool, slots: list[int]
) -> None:
    step = make_step(slots, dtype=dtype, with_norm=with_norm, device=device)
    before = step.qkv.clone()
    step.check(*step.run(store))
    assert torch.equal(step.qkv, before)


@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_may_be_wider_than_what_they_norm(
    store: Store, device: str, dtype: torch.dtype
) -> None:
    step = make_step([5, 0, 9], dtype=dtype, device=device)
    assert step.qk_norm is not None
    step.qk_norm = step.qk_norm.float() + 2**-12
    step.check(*step.run(store))


@kinds
def test_every_even_head_size_is_rotated(store: Store, device: str) -> None:
    for head_dim in (2, 6, 24, 128, 256):
        step = make_step([9], 3, 1, head_dim, device=device)
        step.check(*step.run(store))


@kinds
def test_every_ratio_of_queries_to_keys_is_stored(store: Store, device: str) -> None:
    for ratio, num_kv_heads in (*((ratio, 1) for ratio in (1, 3, 4, 8)), (2, 3)):
        heads = ratio * num_kv_heads, num_kv_heads
        step = make_step([7], *heads, block_size=5, device=device)
        step.check(*step.run(store))


@kinds
def test_queries_may_be_rotated_in_place(store: Store, device: str) -> None:
    step = make_step([3, 9, 0, 1], dtype=torch.float16, device=device)
    apart = step.run(store)
    together = step.run(store, step.queries)
    assert torch.equal(apart[0], together[0]) and torch.equal(apart[1], together[1])


@kinds
def test_a_token_without_a_slot_is_stored_nowhere(store: Store, device: str) -> None:
    for slots in ([-1], [6, -1, 3, -1], [-1] * 9):
        step = make_step(slots, device=device)
        step.check(*step.run(store))


@kinds
def test_no_tokens_are_no_work(store: Store, device: str) -> None:
    q_out, pool = make_step([], device=device).run(store)
    assert q_out.numel() == 0 and torch.all(pool == -3.0)


@kinds
def test_indices_may_be_narrow(store: Store, device: str) -> None:
    step = make_step([4, -1, 8], index_dtype=torch.int32, device=device)
    step.check(*step.run(store))


@kinds
def test_what_a_token_gets_does_not_depend_on_its_batch(store: Store, device: str) -> None:
    step = make_step(list(range(6)), 8, 2, 32, device=device)
    q_out, pool = step.run(store)
    for token in (0, 5):
        alone = make_step([token], 8, 2, 32, device=device)
        alone.qkv = step.qkv[token : token + 1]
        alone.qk_norm, alone.rope_table = step.qk_norm, step.rope_table
        alone.positions = step.positions[token : token + 1]
        its_q, its_pool = alone.run(store)
        where = token // 4, 1, slice(None), slice(None), token % 4
        assert torch.equal(its_q[0], q_out[token])
        assert torch.equal(its_pool[where], pool[where])


def test_every_candidate_stores_the_same(device: str) -> None:
    heads = 6, 3
    step = make_step([2, 0], *heads, 128, dtype=torch.float16, device=device)
    expected = step.run(kv_store.store_qkv)
    for config in unlike(kv_store.candidates(*heads, 128, 2)):
        q_out, pool = step.run(kv_store.store_qkv, config=config)
        assert torch.equal(q_out, expected[0]) and torch.equal(pool, expected[1])


def test_queries_may_be_wider_than_the_pool() -> None:
    step = make_step([5, -1, 8], dtype=torch.bfloat16)
    wide = make_step([5, -1, 8], dtype=torch.bfloat16)
    wide.qkv, wide.qk_norm = step.qkv.float(), step.qk_norm.float()
    q_out, pool = wide.run(reference.store_qkv)
    assert q_out.dtype == torch.float32 and pool.dtype == torch.bfloat16
    expected_q, expected_pool = step.run(reference.store_qkv)
    assert torch.equal(q_out.bfloat16(), expected_q) and torch.equal(pool, expected_pool)


def test_a_plan_serves_every_layer() -> None:
    step = make_step([4, -1, 9])
    block_size = step.pool.shape[4]
    plan = reference.plan_store(step.rope_table, step.positions, step.slots, block_size)
    expected = step.run(reference.store_qkv)
    for _ in range(2):
        q_out, pool = step.run(reference.store_qkv, plan=plan)
        assert torch.equal(q_out, expected[0]) and torch.equal(pool, expected[1])
