"""Choice of the kernel for each GEMM of a training step of a 1B model, and of decoding, by name."""

from __future__ import annotations

import pytest

from wgrad.hip.gemm.plan import Gpu, dense, experts, frozen

MI300X, RX7900 = Gpu(64, 304, True, True), Gpu(32, 96, True, False)
MI250 = Gpu(64, 104, True, False, flushes_denormals=True)
F32, F16, BF16 = 0, 1, 2
TOKENS, HIDDEN, MLP, VOCABULARY, RANK = 2048, 2048, 8192, 128256, 16


@pytest.mark.parametrize("gpu", [MI300X, RX7900], ids=["wave64", "wave32"])
@pytest.mark.parametrize(
    "kinds, layout, mnk, source, name",
    [
        # LoRA, compute float32 and float16: u = x A^T, du = dy B, dA = du^T x, dB = dy^T u
        ((F32, F32), "nt", (TOKENS, RANK, HIDDEN), "gemm_skinny", "gemm_skinny_nt_16"),
        ((F16, F32), "nt", (TOKENS, RANK, MLP), "gemm_skinny", "gemm_skinny_nt_16"),
        ((F16, F32), "nn", (TOKENS, RANK, MLP), "gemm_skinny", "gemm_skinny_nn_16"),
        ((F32, F16), "tn", (RANK, HIDDEN, TOKENS), "gemm_skinny", "gemm_skinny_tn_16"),
        ((F16, F32), "tn", (MLP, RANK, TOKENS), "gemm_skinny", "gemm_skinny_tn_16"),
        ((F32, F32), "tn", (MLP, 64, TOKENS), "gemm_skinny", "gemm_skinny_tn_64"),
        # du A, with dropout on the way
        ((F32, F32), "nn", (TOKENS, HIDDEN, RANK), "gemm_f32", "gemm_f32_nn"),
        # the head, and its gradient from float32 logits
        ((F32, F32), "nt", (256, VOCABULARY, HIDDEN), "gemm_f32", "gemm_f32_nt"),
        # full fine-tuning: dW = dy^T x
        ((F32, F32), "tn", (HIDDEN, MLP, TOKENS), "gemm_f32", "gemm_f32_tn"),
        ((F32, F16), "tn", (HIDDEN, MLP, TOKENS), "gemm_f32", "gemm_mix_tn"),
        # both of 16 bits
        ((F16, F16), "nt", (TOKENS, MLP, HIDDEN), "gemm", "gemm_f16_nt_{shape}"),
        ((BF16, BF16), "tn", (MLP, HIDDEN, TOKENS), "gemm", "gemm_bf16_tn_{shape}"),
        # decoding: one row
        ((F32, F32), "nt", (1, RANK, HIDDEN), "gemv", "gemv"),
        ((F16, BF16), "nt", (1, VOCABULARY, HIDDEN), "gemv", "gemv"),
        # sizes that vectors do not divide
        ((F16, F16), "nt", (41, 123, 67), "gemm", "gemm_f16_nt_unaligned"),
        ((F16, F32), "nt", (41, 8, 67), "gemm_f32", "gemm_any_nt"),
        ((F32, F32), "tt", (128, 128, 64), "gemm_f32", "gemm_any_tt"),
        ((F16, BF16), "nt", (1, 123, 67), "gemv", "gemv_unaligned"),
    ],
)
def test_dense_matmuls_take_the_kernel_of_their_kinds_and_size(
    gpu: Gpu, kinds: tuple[int, int], layout: str, mnk: tuple[int, int, int], source: str, name: str
) -> None:
    plan = dense(gpu, kinds, layout, mnk, 1, True)
    # 2,048 x 8,192 results are 256 tiles of 256 x 256: fewer than an MI300X has compute units.
    assert (plan.source, plan.name) == (source, name.format(shape="small" if gpu is MI300X else "big"))


@pytest.mark.parametrize(
    "kinds, layout, mnk, batch, name",
    [
        # one row: of a batch it is none; of A^T it is; vectors have eight elements
        ((F32, F32), "nt", (1, 128, 64), 3, "gemm_f32_nt"),
        ((F32, F32), "tt", (1, 128, 64), 1, "gemv"),
        ((F16, F16), "nt", (1, 128, 68), 1, "gemv_unaligned"),
        # rows of both operands of A^T B
        ((F16, F16), "tn", (41, 136, 64), 1, "gemm_f16_tn_unaligned"),
        ((F16, F16), "tn", (136, 41, 64), 1, "gemm_f16_tn_unaligned"),
        ((F16, F16), "nn", (41, 136, 68), 1, "gemm_f16_nn_unaligned"),
        ((F32, F32), "nn", (41, 136, 66), 1, "gemm_any_nn"),
        # few rows are no few columns, and a batch has no skinny kernel
        ((F32, F32), "nt", (16, HIDDEN, HIDDEN), 1, "gemm_f32_nt"),
        ((F32, F32), "nt", (HIDDEN, 16, HIDDEN), 2, "gemm_f32_nt"),
        ((F32, F32), "nt", (HIDDEN, 17, HIDDEN), 1, "gemm_skinny_nt_64"),
        ((F32, F32), "nt", (HIDDEN, 65, HIDDEN), 1, "gemm_f32_nt"),
        # no kernel in pieces for A^T B; two types of 16 bits
        ((F32, BF16), "tn", (HIDDEN, MLP, TOKENS), 1, "gemm_mix_tn"),
        ((BF16, F16), "nt", (TOKENS, MLP, HIDDEN), 1, "gemm_mix_nt"),
        # 64 tiles of 256 x 256, of five batches
        ((F16, F16), "nt", (2048, 2048, 64), 4, "gemm_f16_nt_small"),
        ((F16, F16), "nt", (2048, 2048, 64), 5, "gemm_f16_nt_big"),
    ],
)
def test_shapes_next_to_a_limit_take_their_kernel(
    kinds: tuple[int, int], layout: str, mnk: tuple[int, int, int], batch: int, name: str
) -> None:
    assert dense(MI300X, kinds, layout, mnk, batch, True).name == name


@pytest.mark.parametrize(
    "kinds, layout, nk, aligned, name",
    [
        ((F16, F16), "nt", (41, 64), True, "grouped_f16_nt"),
        ((F16, F16), "nt", (41, 68), True, "grouped_mix_nt"),
        ((F16, F16), "nn", (44, 64), True, "grouped_mix_nn"),
        ((F16, F16), "nt", (41, 64), False, "grouped_any_nt"),
        ((F32, F32), "nt", (41, 66), True, "grouped_any_nt"),
        ((F32, F16), "nt", (41, 1 << 23), True, "grouped_any_nt"),
    ],
)
def test_experts_take_the_kernel_of_their_rows(
    kinds: tuple[int, int], layout: str, nk: tuple[int, int], aligned: bool, name: str
) -> None:
    assert experts(MI300X, kinds, layout, nk, F16, aligned=aligned).name == name


@pytest.mark.parametrize("name", ["nf4", "nf4_nested"])
def test_frozen_weights_take_the_kernels_of_their_format(name: str) -> None:
    forward, backward = (TOKENS, MLP, HIDDEN), (TOKENS, HIDDEN, MLP)
    assert frozen(RX7900, F16, F16, name, "nt", forward).name == f"gemm_{name}_f16_nt_big"
    assert frozen(RX7900, F16, F16, name, "nn", backward).name == f"gemm_{name}_f16_nn_big"
    assert frozen(MI300X, F16, F16, name, "nt", (41, 160, 128)).name == f"gemm_{name}_f16_nt_small"
    assert frozen(RX7900, F32, F32, name, "nt", forward).name == f"gemm_{name}_f32_nt"
    assert frozen(RX7900, F32, F32, name, "nn", backward).name == f"gemm_{name}_f32_nn"
    for kind in (F32, F16):
        assert frozen(MI300X, kind, F32, name, "nt", (1, MLP, HIDDEN)).name == f"gemv_{name}"


@pytest.mark.parametrize("name", ["nf4", "nf4_nested"])
def test_mixed_widths_are_split_on_tensor_cores_of_16_bits(name: str) -> None:
    """The head on bfloat16, and NF4 layers beside the float32 stream: in pieces on the MI300X's 16-bit unit."""
    head, back = (256, VOCABULARY, HIDDEN), (256, HIDDEN, VOCABULARY)
    for kind, short in ((F32, "f32"), (F16, "f16")):
        assert dense(MI300X, (kind, BF16), "nt", head, 1, True).name == f"gemm_split_{short}_bf16_nt"
        assert dense(MI300X, (kind, BF16), "nn", back, 1, True).name == f"gemm_split_{short}_bf16_nn"
        assert dense(RX7900, (kind, BF16), "nt", head, 1, True).name == "gemm_mix_nt"
    down = (TOKENS, HIDDEN, MLP)
    assert frozen(MI300X, F16, F32, name, "nt", down).name == f"gemm_split_{name}_f16_nt"
    assert frozen(MI300X, F32, F16, name, "nn", down).name == f"gemm_split_{name}_f32_nn"
    assert frozen(RX7900, F16, F32, name, "nt", down).name == f"gemm_{name}_f32_nt"
    for kind in (F32, BF16):  # bfloat16's values have no kernel in pieces
        assert frozen(MI300X, kind, F32, name, "nt", down).name == f"gemm_{name}_f32_nt"
    assert frozen(Gpu(32, 96, False, False), F16, F16, name, "nt", down).name == f"gemm_{name}_f32_nt"


@pytest.mark.parametrize("gpu", [MI300X, RX7900], ids=["wave64", "wave32"])
def test_long_sums_are_split_until_the_gpu_is_full(gpu: Gpu) -> None:
    """dA of 2,048 tokens: 16 tiles alone would leave most of the GPU idle. Splits are of whole tiles and cover K."""
    plan = dense(gpu, (F32, F32), "tn", (RANK, HIDDEN, TOKENS), 1, True)
    assert plan.swapped and plan.tile.n == 128
    assert plan.splits * (HIDDEN // 128) >= 0.8 * gpu.compute_units
    assert plan.per_split % 64 == 0 and (plan.splits - 1) * plan.per_split < TOKENS <= plan.splits * plan.per_split
    assert dense(gpu, (F32, F32), "nn", (TOKENS, MLP, HIDDEN), 1, True).splits == 1


def test_rows_far_apart_are_read_by_elements() -> None:
    """Bytes of 128 rows of float32 have numbers of 32 bits up to rows of 2^23 elements."""
    assert dense(RX7900, (F32, F32), "nt", (128, 72, (1 << 23) - 8), 1, True).name == "gemm_f32_nt"
    assert dense(RX7900, (F32, F32), "nt", (128, 72, 1 << 23), 1, True).name == "gemm_any_nt"
    assert dense(RX7900, (F32, F16), "nn", (128, 1 << 23, 72), 1, True).name == "gemm_any_nn"


def test_addresses_choose_the_kernel() -> None:
    assert dense(RX7900, (F16, F16), "nt", (128, 128, 64), 1, False).name == "gemm_f16_nt_unaligned"
    assert dense(RX7900, (F32, F32), "nn", (128, 128, 64), 1, False).name == "gemm_any_nn"
    assert dense(RX7900, (F32, F32), "nt", (1, 128, 64), 1, False).name == "gemv_unaligned"
    assert dense(RX7900, (F32, F32), "nt", (128, 16, 64), 1, False).name == "gemm_any_nt"


def test_precise_float16_products_stay_off_tensor_cores_that_flush_denormals() -> None:
    sizes = (HIDDEN, VOCABULARY, TOKENS)
    assert dense(MI250, (F16, F16), "tn", sizes, 1, True, F32).name == "gemm_mix_tn"
    assert dense(MI250, (F16, F16), "nt", sizes, 1, True, F16).source == "gemm"
    assert dense(MI250, (BF16, BF16), "tn", sizes, 1, True, F32).source == "gemm"
    assert dense(MI300X, (F16, F16), "tn", sizes, 1, True, F32).source == "gemm"


def test_k_is_split_over_the_work_groups_left() -> None:
    """No more than the gpu has work-groups left for, multiples of what a turn of a loop takes; none of a batch."""
    gpu, mnk = Gpu(64, 4, True, True), (41, 136, 1064)
    for kinds in ((F16, F16), (F32, F32)):
        one, many = (dense(gpu, kinds, "nt", mnk, batch, True) for batch in (1, 3))
        tiles = 2 if one.tile.n == 128 else 1
        assert (one.splits, one.per_split) == {1: (4, 320), 2: (2, 576)}[tiles]
        assert (many.splits, many.per_split) == (1, 0)


def test_splits_are_as_many_as_fill_the_gpu_and_hold_something() -> None:
    plans = {
        ("tn", (RANK, 4096, MLP)): (19, 448),  # 32 tiles, for twice 304 compute units
        ("tn", (RANK, HIDDEN, 1 << 16)): (32, 2048),  # the most
        ("nt", (128, RANK, 1088)): (6, 192),  # eight parts of 136 are six of 192
        ("nt", (41, 136, 1 << 16)): (16, 4096),  # the most of other kernels
    }
    for (layout, mnk), wanted in plans.items():
        plan = dense(MI300X, (F32, F32), layout, mnk, 1, True)
        assert (plan.splits, plan.per_split) == wanted, mnk
    assert dense(Gpu(64, 64, True, True), (F16, F16), "nt", (2048, 2048, 64), 1, True).name == "gemm_f16_nt_big"


def test_rows_that_eight_does_not_divide_take_the_unaligned_kernel() -> None:
    for gpu in (MI300X, RX7900):
        assert dense(gpu, (F16, F16), "nt", (41, 136, 68), 1, True).name == "gemm_f16_nt_unaligned"


def test_one_row_backward_is_no_row_times_a_weight() -> None:
    """gemv.hip reads rows of the weight, which are the forward's."""
    assert frozen(MI300X, F32, F32, "nf4", "nn", (1, HIDDEN, MLP)).source == "gemm_f32"
