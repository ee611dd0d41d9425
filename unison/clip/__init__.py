"""Per-sample clipping as pure maths: norm methods × gradient methods, coefficients, the planner."""

from unison.clip.bounds import (
    DOUBLE,
    RULES,
    Arithmetic,
    Coefficients,
    NormTable,
    SampleNorms,
    automatic,
    bounded,
    flat,
    mass,
    per_group,
    per_layer,
)
from unison.clip.clipping import Clipping, Storage
from unison.clip.costs import (
    AUTO,
    MACHINES,
    MODES,
    Choice,
    Cost,
    LayerShape,
    UseShape,
    describe,
)
from unison.clip.functional import (
    ClippedGradients,
    Learned,
    PerSampleLoss,
    clipped_gradients,
    learn,
    zeros_of,
)
from unison.clip.norms import (
    GRADIENT_METHODS,
    NORM_METHODS,
    add_clipped,
    from_records,
    measure,
    per_sample_gradients,
)
from unison.clip.plan import Alternative, LayerPlan, Plan, choose, plan_clipping
