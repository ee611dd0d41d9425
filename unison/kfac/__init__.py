"""K-FAC: natural gradient from Kronecker factors, the same on every number of ranks."""

from unison.kfac.config import KFACConfig
from unison.kfac.factors import Layer, Method
from unison.kfac.fisher import Sampled
from unison.kfac.inverse import NotInvertible
from unison.kfac.kfac import KFAC

__all__ = ["KFAC", "KFACConfig", "Layer", "Method", "NotInvertible", "Sampled"]
