"""share-compute: join lent machines into one elastic cluster, to train and serve models too large for one machine."""

__version__ = "0.2.0"

__all__ = ["__version__"]
