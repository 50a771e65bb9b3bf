"""share-compute: join lent machines into one elastic cluster that trains and serves models none could hold alone."""

__version__ = "0.2.0"

__all__ = ["__version__"]
