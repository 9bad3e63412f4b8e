"""This package is kept for plugins of the older form, which import `base.Backend`."""
