"""Where plugins of the older form expect `base.Backend`."""
