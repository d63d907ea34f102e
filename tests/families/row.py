"""Knowledge of a family in tests and in the page of models: a row in one of the files of this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Reading:
    """How transformers reads the family's config.json.

    Args:
        given: Keys of the file that differ from the common ones.
        lacks: Common keys that the family's class has not, or not as given.
        prepare: Changes a configuration of transformers before it is compared.
        head_dims: Returns the widths of heads in layers without a window and with one; None: head_dim.
        epsilon: Key of the norms' epsilon, or its value if there is no key.
        mlp_width: Key of the width of an MLP.
        o_bias, mlp_bias: Key that asks for a bias, or whether each model has one.
        windows: Returns the width of each layer's window; None: of the layers that layer_types calls sliding.
        rotates: Returns whether each layer has rotary embeddings; None: as no_rope_layers says.
        fails: Keys without which transformers fails when a model is made; wgrad refuses the file.
        fails_of_null: The same, for keys that are null.
        divides_by_zero: Keys by which transformers' class divides: nothing is compared without them.
        read_nulls, refused_nulls: Least number of keys that may be null, and that may not.
        not_read: Pattern of keys of transformers' class that its model does not read, and wgrad neither.
        ways: Keys that say the same in another way: changes of a tiny model with 3 layers and a window of 5.
    """

    given: Values = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    prepare: Callable[[Any], None] = lambda theirs: None
    head_dims: Callable[[Any], tuple[int, int]] | None = None
    epsilon: str | float = "rms_norm_eps"
    mlp_width: str = "intermediate_size"
    o_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = "mlp_bias"
    windows: Callable[[Any], list[int]] | None = None
    rotates: Callable[[Any], list[bool]] | None = None
    fails: tuple[str, ...] = ()
    fails_of_null: tuple[str, ...] = ()
    divides_by_zero: tuple[str, ...] = ()
    read_nulls: int = 5
    refused_nulls: int = 8
    not_read: str = "$^"
    ways: tuple[Values, ...] = ()


@dataclass(frozen=True)
class Row:
    """A family in tests.

    Args:
        cases: Configurations whose logits, loss and gradients are compared with transformers, by a name that begins
            with the family's: changes of the tiny model. The page of models says how many there are.
        tiny: Keys of the tiny model that differ from the common ones (tests/train/tiny_models.py).
        finish: Changes the tiny model's config.json at the end.
        rounded: Cases whose constants transformers has in float32: compared less closely in float64.
        in_text: Changes of a case for greedy text, in which transformers' two largest logits must be apart.
        prompts: Lengths of a case's prompts.
        without_cache: Cases of which transformers reads the whole sequence for each token: with a cache it does not
            clamp Mamba-2's time steps, as it does in whole sequences, and refuses models without attention.
        refused: Keys with values that wgrad does not build, one at a time.
        may_have_no_experts: All layers are dense if a file has 0 experts.
        unusual: With experts: unusual values of keys, drawn at random.
        never_unusual: Common keys that stay as they are there, also without experts.
        scaling: The only scaling of rotary embeddings; empty: any.
        in_cache: Changes of the tiny model that is read with a cache.
        all_linear: Changes of the tiny model with projections of which an adapter is read again.
        with_experts: Changes of the tiny model that give it experts.
        tied: Models share embeddings and head by default.
        eager: transformers has no other attention than the plain one.
        norms_of_one: Beginning of the name of transformers' norms whose files hold weight - 1.
        layer_norms: Name of a LayerNorm of its own that computes in float32.
        names: Beginnings of wgrad's names of weights, and of those in transformers' model.
        turned: Weights of a layer with so many axes are [..., in, out] in transformers.
        smaller: Factors of random weights, by a part of their names.
        in_llama_cpp: Changes of the tiny model that llama.cpp needs.
        gguf_cases: Changes besides whose models in GGUF are compared with llama.cpp, and read again.
        read_gguf, merged_gguf: The same, for reading a GGUF file, and for a merged one in llama.cpp.
        adapted_layers: Changes of the model whose adapter llama.cpp applies.
        paired: Rotary pairs lie side by side in a GGUF file, and not in transformers.
        gguf_keys: Writes keys of a GGUF file that other families have not, given gguf's writer and a ModelConfig.
        read_as: Architecture of a model read from GGUF, if it is another family's of the same arithmetic.
        as_in_gguf: Returns the ModelConfig of a model as it is read from GGUF.
        gelu_table: llama.cpp computes the activation by a table in float16.
        files_of_experts: A part of names in a file that transformers saves; "": that is not compared.
        renamed: These files have other names of weights than wgrad's and than those of a model.
        adapted_mlps: PEFT adapts projections of MLPs one by one next to experts.
        balanced: Changes of the tiny model whose load-balancing loss is compared; None: it is not.
        in_test_all: Tests that only `make test-all` runs, by their subject in `tests/sweeps.py`: "peft", with a device
            "peft wgpu". "cases" are all cases but the first, and "case X" is one.
        in_test: Tests of which `make test` runs few families, and this one: a subject and a parameter, "greedy gemma4".
        reading: How transformers reads config.json.
    """

    cases: Mapping[str, Values]
    tiny: Values = field(default_factory=dict)
    finish: Callable[[dict[str, Any]], None] = lambda config: None
    rounded: tuple[str, ...] = ()
    in_text: Mapping[str, Values] = field(default_factory=dict)
    prompts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    without_cache: tuple[str, ...] = ()
    refused: Values = field(default_factory=dict)
    may_have_no_experts: bool = False
    unusual: Mapping[str, list[Any]] = field(default_factory=dict)
    never_unusual: tuple[str, ...] = ()
    scaling: Values = field(default_factory=dict)
    in_cache: Values = field(default_factory=lambda: {"sliding_window": 6})
    all_linear: Values = field(default_factory=dict)
    with_experts: Values = field(default_factory=dict)
    tied: bool = False
    eager: bool = False
    norms_of_one: str = ""
    layer_norms: str = ""
    names: tuple[tuple[str, str], ...] = ()
    turned: int = 0
    smaller: Mapping[str, float] = field(default_factory=dict)
    in_llama_cpp: Values = field(default_factory=dict)
    gguf_cases: tuple[Values, ...] = ()
    read_gguf: tuple[Values, ...] = ()
    merged_gguf: tuple[Values, ...] = ()
    adapted_layers: Values = field(default_factory=lambda: {"num_hidden_layers": 2})
    paired: bool = False
    gguf_keys: Callable[[Any, Any], None] = lambda writer, config: None
    read_as: str = ""
    as_in_gguf: Callable[[Any], Any] = lambda config: config
    gelu_table: bool = False
    files_of_experts: str = ""
    renamed: bool = False
    adapted_mlps: bool = False
    balanced: Values | None = None
    in_test_all: frozenset[str] = frozenset()
    in_test: frozenset[str] = frozenset()
    reading: Reading = Reading()
