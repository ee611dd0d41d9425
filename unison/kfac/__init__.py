"""K-FAC: natural gradient from Kronecker factors, the same on every number of ranks."""

from unison.kfac.config import KFACConfig
from unison.kfac.inverse import NotInvertible
from unison.kfac.kfac import KFAC
from unison.kfac.labels import Sampled
from unison.kfac.layers import Layer, Method
