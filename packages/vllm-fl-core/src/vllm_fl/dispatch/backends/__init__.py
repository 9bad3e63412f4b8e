"""The package from which plugins of the older form import `base.Backend`."""
