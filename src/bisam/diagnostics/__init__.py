"""What the loss looks like around the weights of any model: sharpness, flips, curvature, surfaces.

    worst case   max L(w + ε) − L(w)   over ‖T⁻¹ε‖ ≤ ρ,   T = 1   or   T = |w| + η (adaptive)
    average      E L(w + ε) − L(w)     over ‖T⁻¹ε‖ = ρ
    curvature    the largest eigenvalues and the trace of H = ∇²L(w)

Each is one call on a model and data, `(x, y)` or an iterable of such batches, and returns plain numbers. `objective` is
the mean loss L, cross entropy if None. Batches add up to the loss of all samples together. Only parameters that require
gradients are moved and differentiated.

The model runs in evaluation mode, unless `train_mode` is set (batch statistics and dropout). Afterwards everything is
restored: weights bit for bit, buffers, modes, gradients, and torch's random state. Every pass over the data starts from
the same buffers and random state, so L is one function of w and a shuffled DataLoader gives the same batches again.

`progress(done, total)` is called after every batch, or after every pass where the data has no length.
"""

from bisam.diagnostics.average import average_sharpness
from bisam.diagnostics.curvature import hessian_eigenvalues, hessian_trace
from bisam.diagnostics.estimates import Estimate
from bisam.diagnostics.landscape import Surface, surface
from bisam.diagnostics.worst_case import Sharpness, flips, sharpness

__all__ = [
    "Estimate",
    "Sharpness",
    "Surface",
    "average_sharpness",
    "flips",
    "hessian_eigenvalues",
    "hessian_trace",
    "sharpness",
    "surface",
]
