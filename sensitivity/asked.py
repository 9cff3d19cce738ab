"""Products by name, and the keys of a job file that belong to some of them alone."""

from __future__ import annotations

PRODUCTS: dict[str, tuple[str, ...]] = {
    "jacobian": (),
    "vjp": ("vectors",),
    "jvp": ("directions",),
    "hessian": (),
    "hvp": ("directions",),
    "gradient_norm": (),
    "gram": (),
    "integrated_gradients": ("baseline", "steps"),
    "smooth_gradients": ("noise", "samples", "seed"),
    "expected_gradients": ("samples", "seed"),
}
PRODUCT_KEYS = tuple(dict.fromkeys(key for keys in PRODUCTS.values() for key in keys))
