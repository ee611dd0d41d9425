"""How norms become coefficients: the rules that `make_private(clip_rule=...)` knows."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from unison.clip import RULES, SampleNorms, per_layer

# (norms of the used parameters, norms over all, C, names of all parameters) -> coefficients by name
ClipRule = Callable[
    [Mapping[str, SampleNorms], SampleNorms, float, Sequence[str]], Mapping[str, Tensor]
]
CLIP_RULES: dict[str, ClipRule] = {
    **{
        # `rule` is bound where the function is made; a loop variable would be the last one.
        name: lambda _, total, clip_norm, names, rule=rule: dict.fromkeys(
            names, rule(total, clip_norm).values
        )
        for name, rule in RULES.items()
    },
    "per_layer": lambda each, _, clip_norm, names: (
        per_layer(each, clip_norm, num_parameters=len(names)).values if each else {}
    ),
}
