"""Per-sample clipping as pure maths: norm methods × gradient methods, coefficients, the planner."""

from unison.clip.alternatives import Alternative
from unison.clip.bounds import DOUBLE, Arithmetic, NormTable, SampleNorms, bounded, mass
from unison.clip.clipping import Clipping, Storage
from unison.clip.coefficients import (
    RULES,
    Coefficients,
    GroupCoefficients,
    automatic,
    flat,
    per_group,
    per_layer,
)
from unison.clip.costs import MACHINES, Cost, Machine
from unison.clip.functional import (
    ClippedGradients,
    Learned,
    PerSampleLoss,
    axes_of,
    clipped_gradients,
    learn,
    zeros_of,
)
from unison.clip.gradients import (
    GRADIENT_METHODS,
    GradientMethod,
    add_clipped,
    from_kept,
    from_records,
)
from unison.clip.layers import AUTO, MODES, Choice, LayerShape, UseShape, describe
from unison.clip.norms import NORM_METHODS, NormMethod, measure, per_sample_gradients
from unison.clip.plan import LayerPlan, Plan, choose, plan_clipping

__all__ = [
    "AUTO",
    "DOUBLE",
    "GRADIENT_METHODS",
    "MACHINES",
    "MODES",
    "NORM_METHODS",
    "RULES",
    "Alternative",
    "Arithmetic",
    "Choice",
    "ClippedGradients",
    "Clipping",
    "Coefficients",
    "Cost",
    "GradientMethod",
    "GroupCoefficients",
    "LayerPlan",
    "LayerShape",
    "Learned",
    "Machine",
    "NormMethod",
    "NormTable",
    "PerSampleLoss",
    "Plan",
    "SampleNorms",
    "Storage",
    "UseShape",
    "add_clipped",
    "automatic",
    "axes_of",
    "bounded",
    "choose",
    "clipped_gradients",
    "describe",
    "flat",
    "from_kept",
    "from_records",
    "learn",
    "mass",
    "measure",
    "per_group",
    "per_layer",
    "per_sample_gradients",
    "plan_clipping",
    "zeros_of",
]
