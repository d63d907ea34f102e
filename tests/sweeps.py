"""Parameter sets that only `make test-all` runs: more sizes, seeds and dtypes of what `make test` tests.

SWEEPS has an entry for each such test: a rule that chooses the parameter sets of `make test`. Tests that only `make
test-all` runs have the marker `all`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.families.table import CASES, FAMILY_ROWS

_SIZES = r"\d+(?:x\d+)+|(?<![A-Za-z_\d])\d+"  # 41x123 and 41, but not the numbers in words such as float16 or q4_0


def _but_for_sizes(names: Sequence[str]) -> list[list[str]]:
    """Group names that differ only in sizes."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(_SIZES, "0", name), []).append(name)
    return list(groups.values())


@dataclass(frozen=True)
class Sizes:
    """Chooses `count` of the sets that differ only in sizes."""

    count: int = 1

    def chosen(self, names: Sequence[str]) -> set[str]:
        return {name for group in _but_for_sizes(names) for name in Evenly(self.count).chosen(group)}


@dataclass(frozen=True)
class Odd:
    """Chooses one of the sets that differ only in sizes: the one whose sizes have the fewest factors of two."""

    def chosen(self, names: Sequence[str]) -> set[str]:
        return {min(group, key=self._twos) for group in _but_for_sizes(names)}

    @staticmethod
    def _twos(name: str) -> int:
        numbers = [int(size) for sizes in re.findall(_SIZES, name) for size in sizes.split("x")]
        return sum((number & -number).bit_length() - 1 for number in numbers if number)


@dataclass(frozen=True)
class Types:
    """Chooses from the sets of the rule `of`, without those that match `without`.

    Of sets that differ only in float32 and float16 it takes one, the dtypes in turn.
    """

    of: Sizes | Odd
    first: int = 0  # 1: begin with float16
    without: str = "$^"
    always: str = "$^"  # pattern of sets that run in each dtype

    def chosen(self, names: Sequence[str]) -> set[str]:
        chosen = {name for name in self.of.chosen(names) if not re.search(self.without, name)}
        always = {name for name in chosen if re.search(self.always, name)}
        groups: dict[str, list[str]] = {}
        for name in (name for name in names if name in chosen - always):
            groups.setdefault(re.sub(r"/float(32|16)(?=[*\]])", "/float", name), []).append(name)
        return always | {group[(turn + self.first) % len(group)] for turn, group in enumerate(groups.values())}


@dataclass(frozen=True)
class Variants:
    """Chooses one of the sets that differ only in sizes and dtypes, the dtypes in turn.

    without: sets that match it are taken only where there is no other.
    """

    without: str = "$^"

    def chosen(self, names: Sequence[str]) -> set[str]:
        groups: dict[str, list[str]] = {}
        for name in names:
            plain = re.sub(r"\d+(?:x\d+)+|\bb?float\d+\b|(?<![A-Za-z_\d])\d+(?![A-Za-z_\d])", "0", name)
            groups.setdefault(re.sub(r"0(?:[*>,]0)+", "0", plain), []).append(name)
        chosen = set[str]()
        for turn, group in enumerate(groups.values()):
            taken, others = group[turn % len(group)], [name for name in group if not re.search(self.without, name)]
            chosen.add(taken if taken in others or not others else others[0])
        return chosen


@dataclass(frozen=True)
class Evenly:
    """Chooses `count` sets, evenly spread over all."""

    count: int

    def chosen(self, names: Sequence[str]) -> set[str]:
        count = min(self.count, len(names))
        return {names[(2 * i + 1) * len(names) // (2 * count)] for i in range(count)}


@dataclass(frozen=True)
class Without:
    """Chooses all sets that do not match the pattern."""

    pattern: str

    def chosen(self, names: Sequence[str]) -> set[str]:
        return {name for name in names if not re.search(self.pattern, name)}


@dataclass(frozen=True)
class Families:
    """Chooses by the rows of families (tests/families), and all sets that name none.

    subject: what `Row.in_test_all` calls the test, or `Row.in_test` if `make test` runs few families (few).
    """

    subject: str
    few: bool = False

    def chosen(self, names: Sequence[str]) -> set[str]:
        return {name for name in names if self._is_chosen(name.partition("[")[2].rstrip("]").split("-"))}

    def _is_chosen(self, words: Sequence[str]) -> bool:
        case = next((word for word in words if word in CASES), "")
        row = FAMILY_ROWS.get(next((word for word in words if word in FAMILY_ROWS), CASES.get(case, ("",))[0]))
        if row is None:
            return True
        if self.few:
            return any(f"{self.subject} {word}" in row.in_test for word in words)
        later = bool(case) and case != next(iter(row.cases))
        subjects = (self.subject, *(("cases",) if later else ()))
        left = {f"case {case}", *subjects, *(f"{subject} {word}" for subject in subjects for word in words)}
        return not left & row.in_test_all


@dataclass(frozen=True)
class InTurn:
    """Chooses one of the sets that differ only after the last `-`: the first of the first group, and so on in turn.

    pattern: sets that match it are left out. rare: values that only the first group has, which runs whole. always: sets
    that match it always run.
    """

    pattern: str = "$^"
    rare: tuple[str, ...] = ()  # slow to compile: of 8 lanes, each has four times the elements of one of 32
    always: str = "$^"

    def chosen(self, names: Sequence[str]) -> set[str]:
        groups: dict[str, list[str]] = {}
        for name in names:
            if not re.search(self.pattern, name):
                groups.setdefault(name.rpartition("-")[0], []).append(name)
        turns = {self._turn(group, i) for i, group in enumerate(groups.values())}
        always = {name for name in names if re.search(self.always, name)}
        return turns | always | set(next(iter(groups.values()), []))

    def _turn(self, group: Sequence[str], i: int) -> str:
        usual = [name for name in group if name.rpartition("-")[2].rstrip("]") not in self.rare]
        return usual[i % len(usual)]


# Epilogues do not depend on the format, and NF4 has cases of all.
_EPILOGUES_OF_Q8_0 = r"\[linear_q8_0(_backward)?/(bias|residual|rows? epilogue|mixed|float)"
# The other kind of kernel has these: GEMMs plan their dtypes before they choose it, and share what is added to sums.
_OF_GPUS = (  # left out on a software driver, which dequantizes first, has one tile and no skinny GEMM
    r"|/skinny |\[gemm_\w+/mixed/|\[linear_\w+/(tiles|whole tiles|block 128|lowrank 5)[ /]"
    r"|_backward/row (lowrank )?double|\[linear_nf4(_backward)?/((odd )?of b?float16|blocks across rows)"
)
_OF_SOFTWARE = (  # left out on a GPU's tiles
    r"|default dtype|/(float16 to float32|float32 to float16)/|\[gemm_\w+/(alpha|bias|residual|residual float32)/"
    r"|\[linear_nf4/(bias|residual|of bfloat16|of float16/)|/tiles lowrank|/plain double|/skinny \w+/[x\d]+/float32\]"
    r"|\[linear_nf4_backward/(row (double|lowrank)|block 128|of float16)|\[linear_q8_0_backward/row/"
    r"|\[linear_cross_entropy/(softcap|per target|all ignored|loss only|mixed|bias loss only|bfloat16 weight|bias rows)"
)

SWEEPS: Mapping[str, Sizes | Types | Variants | Evenly | Without | InTurn | Families] = {
    # WGSL kernels: all operators, variants and formats stay.
    "tests/wgsl/test_gemm.py::test_tiled_kernels_are_within_the_limits": Types(
        Odd(),
        without=rf"{_EPILOGUES_OF_Q8_0}|\[linear_nf4(_backward)?/(tiles|blocks across rows|odd) double"
        # Forwards of formats: test_gemv.py has each, and backwards decode with the same functions.
        r"|\[linear_(?!nf4|q8_0|q6_k)\w+(?<!_backward)/row/|\[linear_q8_0/sixteen rows"
        r"|\[linear_(?!nf4|q8_0|q6_k|iq2_xxs)\w+(?<!_backward)/plain/" + _OF_SOFTWARE,
    ),
    "tests/wgsl/test_gemm.py::test_products_on_the_drivers_own_kind_are_within_the_limits": Types(
        Odd(),
        first=1,
        # GPUs' skinny GEMMs; weights that test_memory_ops.py decodes by the same shader; and GEMVs of formats that are
        # decoded like one that stays.
        without=_EPILOGUES_OF_Q8_0
        + _OF_GPUS
        + r"|\[lora_d[ub]/stack|\[linear_(?!nf4|q8_0|q6_k|q4_0|iq2_xxs|tq2_0)\w+(?<!_backward)/rows?[ /]"
        + r"|\[linear_(?!nf4|q8_0|q6_k|iq2_xxs)\w+/plain|\[(linear_nf4|gemm_nt)/sixteen rows",
    ),
    # Each tile, and each split of each transposition.
    "tests/wgsl/test_gemm.py::test_every_tile_and_split": Without(
        r"^(?!.*\[((nn-1|tn-3)-Tile\(m=32, n=32, k=8,|(nn-3|tt-1)-Tile\(m=64, n=16,|nt-1-Tile\(m=16,|nt-3-Tile\(m=128,"
        r"|tn-1-Tile\(m=64, n=64,|tt-3-Tile\(m=32, n=32, k=16,))"
    ),
    "tests/wgsl/test_gemm.py::test_the_whole_tile_is_within_the_limits": Evenly(1),
    "tests/wgsl/test_gemm.py::test_the_tile_of_software_drivers_is_within_the_limits": Evenly(1),
    "tests/wgsl/test_moe.py::test_fewer_rows_run_on_tensor_cores": Without("128 x 128|linear/q6_k|backward/nf4 double"),
    "tests/wgsl/test_moe.py::test_cases_run_on_tensor_cores_within_the_limits": Without("backward/q8_0"),
    "tests/wgsl/test_moe.py::test_a_row_for_every_fourth_expert_goes_one_by_one": Without("q6_k"),
    "tests/wgsl/test_quantize.py::test_quantizing_and_back_equals_the_reference": InTurn(),
    "tests/wgsl/test_gemm_matrix.py::test_cases_run_on_tensor_cores_within_the_limits": InTurn(
        r"(gemm_nn/plain|gemm_nt/short inner|gemm_nt/epilogue|gemm_tn/lowrank)/.*large tile"
        r"|(gemm_nn|gemm_tn)/(lowrank|accumulate|bfloat16)/.*two tile|linear_nf4_backward/in blocks double/.*large tile"
        r"|linear_(iq4_nl(_backward)?|nvfp4|q4_0|q5_1|mxfp4_backward|q4_1(_backward)?|q5_0(_backward)?)/plain"
        r"|linear_(iq2_xxs|q2_k_backward|q4_k|q6_k|nf4(_backward)?)/decoded within"
        r"|linear_(mxfp4|q4_0|q4_1|q5_0|q5_1|q5_k|q8_0|tq|iq4|iq3|nvfp4|iq2_x?s|iq1|q3_k)\w*/decoded within"
        r"|skinny/(64x64x4112|624x20x208)|few rows double/(13|100)x",
        rare=("8", "16"),
        always=r"(linear_nf4/plain/|gemm_nt/skinny/208x20x).*-16\]",
    ),
    "tests/wgsl/test_attention_matrix.py::test_cases_run_on_their_kernels_within_the_limits": InTurn(
        r"(attention_backward/window|attention/grouped)/.*-16\]", rare=("8",)
    ),
    "tests/wgsl/test_attention_matrix.py::test_pairs_of_subgroups_share_rows": InTurn(),
    "tests/wgsl/test_gemm_matrix.py::test_gradients_of_logits_run_on_tensor_cores": Evenly(1),
    "tests/wgsl/test_gemm_matrix.py::test_what_is_added_is_read_ahead": Evenly(2),
    "tests/wgsl/test_gemm_matrix.py::test_a_skinny_matmul_may_take_one_launch": Evenly(2),
    "tests/wgsl/test_gemm_matrix.py::test_a_skinny_matmul_without_workgroup_memory_takes_the_general_kernel": Evenly(2),
    "tests/wgsl/test_cooperative.py::test_subgroups_counted_as_others_than_the_drivers_are_wrong": Without("skinny"),
    "tests/wgsl/test_gemv.py::test_every_number_of_rows_takes_its_kernel": Without(
        r"\[(?!software-2|subgroups-2|subgroups-6|workgroup-8)"
    ),
    "tests/wgsl/test_gemv.py::test_few_rows_of_every_format_are_within_the_limits": Without(r"\[(q5_k-16|q6_k-8)-"),
    # float16 with heads of 64 and 96, float32 with all others: cases of one width share shaders.
    "tests/wgsl/test_attention.py::test_cases_are_within_their_limits": Without(
        r"x(64|96)(,\d+)?/float32\]|x(?!64|96)\d+(,\d+)?/float16\]|attention_backward/width 96|\[attention/width 10"
        r"|/softcap/"
    ),
    "tests/wgsl/test_attention.py::test_every_tile_of_the_tables_is_within_the_limits": Evenly(6),
    "tests/wgsl/test_attention.py::test_splits_are_within_the_limits": Without(r"-(7|40)\]"),
    "tests/wgsl/test_gemm.py::test_a_head_larger_than_one_binding_gives_the_same_loss": Without(
        r"\[(bfloat16-True|float32-False)\]"
    ),
    "tests/wgsl/test_norm.py::test_norms_are_within_the_limits": Without(
        r"\((37, 96|41, 128|4099, 64|3, 16384|3, 1024)\)"
    ),
    "tests/wgsl/test_norm.py::test_norms_in_windows_are_within_the_limits": InTurn(),
    "tests/wgsl/test_norm.py::test_rope_in_windows_is_within_the_limits": InTurn(),
    "tests/wgsl/test_submission_queue.py::test_a_program_may_end_at_any_time": Without("_exit|SystemExit"),
    # The gradient of the delta rule in float16: test_workgroup_memory.py has it on tensor cores. And a mean far from
    # zero: float16's limit hides how it was rounded.
    "tests/wgsl/test_memory_ops.py::test_cases_are_within_their_limits": Variants(
        without=r"\[(delta_rule_backward|layer_norm\w*/mean 1000)/.*float16"
    ),
    # HIP: operators keep all cases on one architecture, since these kill mutants.
    "tests/hip/test_access_counts.py::test_counts_are_those_of_the_table": Without(
        r"gfx90a|gfx1201|gfx942-.*float32|gfx1100-(?!products-float32|skinny-float32|attention-float32)"
    ),
    "tests/hip/test_operators.py::test_cases_are_within_their_limits": Types(
        Sizes(99),
        without=r"gfx942-((linear_)?(iq\d|nvfp4|q[23]_k|tq\d)|linear_cross_entropy/(softcap )?large)",
        always="gfx1100",
    ),
    "tests/hip/test_operators.py::test_workgroups_may_run_in_reversed_order": Without("gfx1100"),
    # test_operators.py compares every gradient with the reference.
    "tests/hip/test_gradients.py::test_gradient_equals_central_differences": Evenly(16),
    "tests/hip/test_every_kernel.py::test_every_kernel_is_launched": Without("gfx90a|gfx1100"),
    "tests/hip/test_objects.py::test_compiling_again_gives_the_same_bytes": Evenly(2),
    "tests/hip/test_alignment.py::test_a_misaligned_array_takes_the_narrow_kernels": Without(
        r"gfx1100-.*-(k|v|do|b)\]$"
    ),
    "tests/hip/test_self_check.py::test_every_kernel_of_training_is_checked": Without("gfx90a|gfx1100|gfx1201"),
    "tests/hip/test_training.py::test_16_bit_training_is_on_the_matrix_units": Evenly(1),
    "tests/hip/test_training.py::test_steps_have_the_losses_of_numpy": Evenly(1),
    "tests/hip/test_training.py::test_16_bits_follow_float32": Evenly(1),
    "tests/hip/test_training.py::test_greedy_is_the_likeliest_token": Evenly(1),
    "tests/hip/test_training.py::test_nothing_grows": Evenly(2),
    # Runs: one set of each subject stays.
    "tests/train/test_oracle_experts.py::test_the_load_balancing_loss_is_that_of_transformers": Families("balance"),
    "tests/train/test_oracle_experts.py::test_files_of_transformers_and_ours_are_read_by_both": Families(
        "expert files"
    ),
    "tests/train/test_oracle_experts.py::test_ten_steps_on_few_bits_have_the_losses_of_peft": Without("GptOss"),
    "tests/train/test_oracle_experts.py::test_experts_of_few_bits_in_gguf_train_as_they_are_stored": Without(
        "wgpu-(mxfp4|q8_0)"
    ),
    "tests/train/test_oracle_experts.py::test_peft_loads_our_adapter_of_experts": Without("wgpu-(GptOss|NemotronH)"),
    "tests/train/test_oracle_experts.py::test_we_load_and_merge_peft_adapters_of_experts": Without(
        "wgpu-(GptOss|GraniteMoe|NemotronH)|cpu-Gemma4"
    ),
    "tests/train/test_oracle_experts.py::test_experts_with_no_token_or_all_compute_as_in_transformers": Without(
        "wgpu-GptOss"
    ),
    "tests/train/test_offload.py::test_copies_beside_launches_change_neither_bits_nor_memory": Evenly(1),
    "tests/train/test_offload.py::test_no_number_of_offloaded_layers_changes_a_bit": Evenly(1),
    "tests/train/test_stream_weights.py::test_the_bits_are_those_of_weights_on_the_device": Without("Gemma4|GptOss"),
    "tests/train/test_stream_weights.py::test_an_evaluation_lies_where_steps_have_their_arrays": Evenly(1),
    "tests/train/test_stacks.py::test_training_and_what_it_writes_are_those_of_projections_apart": Evenly(1),
    "tests/train/test_stacks.py::test_decoding_is_that_of_each_projection_by_itself": Without("wgpu"),
    "tests/train/test_generation.py::test_greedy_is_the_likeliest_token_of_the_whole_sequence": Evenly(3),
    "tests/train/test_generation.py::test_a_model_that_computes_no_numbers_gives_no_text": Without("wgpu-float16"),
    "tests/train/test_gguf_files.py::test_a_step_is_that_of_the_restored_values": Without("wgpu-all"),
    "tests/train/test_loop.py::test_nothing_is_compiled_and_memory_does_not_grow_after_the_first_steps": Without(
        "wgpu-options3"
    ),
    "tests/train/test_generation.py::test_prompts_of_different_lengths_give_the_text_of_each_alone": Without(
        r"wgpu-(Gemma2|Mistral)"
    ),
    "tests/train/test_step_counts.py::test_a_step_takes_no_more_than_unsloths": Evenly(3),
    "tests/train/test_step_counts.py::test_the_8b_trains_in_3_gib_with_its_weights_in_main_memory": Evenly(1),
    "tests/train/test_plan.py::test_all_shaders_are_prepared_and_memory_peaks_where_it_was_said": Without(
        r"\[plain|simple scales|\[gradient_checkpointing"
    ),
    "tests/train/test_fit.py::test_as_few_layers_are_offloaded_as_fit": Evenly(1),
    "tests/train/test_data_kinds.py::test_memory_is_bounded_by_four_times_the_file_or_ten_mebibytes": Evenly(2),
    "tests/train/test_data_files.py::test_memory_is_bounded_by_four_times_the_file_or_10_mib": Without(
        "10{6}-|-lines|-text"
    ),
    "tests/train/test_oracle_generation.py::test_text_beyond_the_original_length_is_that_of_transformers": Without(
        "MiniCPM3"
    ),
    "tests/train/test_oracle_files.py::test_weights_in_fp8_are_read_as_in_transformers": Without(r"\[blocks\]"),
    # Model families: logits and gradients of each; of other tests, one family for each feature in which they differ.
    "tests/train/test_oracle_model.py::test_logits_loss_and_every_gradient_equal_transformers": Families("logits"),
    "tests/train/test_oracle_float64.py::test_loss_and_every_gradient_equal_transformers_in_float64": Families(
        "float64", few=True
    ),
    "tests/train/test_oracle_greedy.py::test_greedy_text_is_that_of_transformers": Families("greedy", few=True),
    "tests/train/test_oracle_adapter.py::test_eight_steps_have_the_losses_of_transformers": Families("steps", few=True),
    "tests/train/test_oracle_adapter.py::test_peft_loads_our_adapter_and_we_load_what_it_saves": Families("peft"),
    "tests/train/test_oracle_merge.py::test_onto_the_original_is_what_peft_merges": Families("merge"),
    "tests/train/test_model.py::test_decoding_with_a_cache_gives_the_logits_of_the_whole_sequence": Families("cache"),
    "tests/train/test_oracle_merge_gguf.py::test_llama_cpp_computes_what_we_do": Families("gguf merge"),
    "tests/train/test_oracle_gguf_adapter.py::test_llama_cpp_computes_what_we_do": Families("gguf adapter"),
    "tests/train/test_oracle_gguf_alone.py::test_the_model_is_the_one_that_was_written": Families("gguf alone"),
    "tests/train/test_gemma4.py::test_what_is_kept_for_the_backward_changes_no_bit": Without("wgpu"),
    "tests/train/test_gemma4.py::test_greedy_text_is_that_of_transformers": Without("Gemma"),
    "tests/train/test_oracle_multimodal.py::test_text_parts_of_other_models_take_and_give_peft_adapters": Without(
        r"\[(?!(gemma4|mistral3 of.*|qwen2_5_vl|qwen3_vl_moe|lfm2_vl|smolvlm|nemotron_h_omni|qwen3_asr)\])"
    ),
    "tests/train/test_delta_net.py::test_eight_steps_follow_torch": Without("Granite"),
    "tests/train/test_delta_net.py::test_sequences_that_come_and_go_read_as_each_alone": Without("Granite.*-3"),
    "tests/train/test_delta_net.py::test_greedy_text_is_that_of_transformers": Without("Granite"),
    # Bench scripts: those that no other test starts.
    "tests/test_bench_scripts.py::test_a_script_writes_its_rows": Without(
        "bench_(attention|gemm|weights|memory_ops|start|train)"
    ),
}


def sweep_part(names: Iterable[str]) -> set[str]:
    """Return those of these node ids that only `make test-all` runs."""
    sets: dict[str, list[str]] = {}
    for name in names:
        test = name.partition("[")[0]
        if test in SWEEPS:
            sets.setdefault(test, []).append(name)
    return {name for test, of_test in sets.items() for name in set(of_test) - SWEEPS[test].chosen(of_test)}
