"""What is computed of a target, window by window: one module a product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..job import SensitivitySection
from .expected_gradients import ExpectedGradients
from .gradient_norm import GradientNorm
from .gram import Gram
from .hessian import Hessian
from .hvp import Hvp
from .integrated_gradients import IntegratedGradients
from .jacobian import Jacobian
from .jvp import Jvp
from .product import Product
from .smooth_gradients import SmoothGradients
from .vjp import Vjp

if TYPE_CHECKING:
    from ..facts import ModelFacts
    from ..record import Record

PRODUCTS: dict[str, type[Product]] = {
    product.name: product
    for product in (
        Jacobian,
        Vjp,
        Jvp,
        Hessian,
        Hvp,
        GradientNorm,
        Gram,
        IntegratedGradients,
        SmoothGradients,
        ExpectedGradients,
    )
}

__all__ = ["PRODUCTS", "Product", "product_asked", "product_kept"]


def product_asked(wanted: SensitivitySection, facts: ModelFacts, record: Record) -> Product:
    """The product of a job. Raises `Refused`."""
    return PRODUCTS[wanted.product].asked(wanted, facts, record)


def product_kept(wanted: SensitivitySection, kept: dict[str, np.ndarray]) -> Product:
    """The product of a run, from what it keeps: see `Product.kept`."""
    return PRODUCTS[wanted.product].again(kept)
