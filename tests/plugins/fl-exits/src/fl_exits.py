"""A plugin whose import ends the process, as a vendor's library that finds no device may."""

import os

os._exit(0)
